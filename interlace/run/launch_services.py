"""Starts workers beyond the roles of a run: engines of a server, engines that join, and the warm-up."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from interlace.core.errors import UserError
from interlace.engines.rollout.config import KVNeeds
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.rollout.kinds.address import AddressKind
from interlace.engines.train.config import TrainConfig
from interlace.engines.train.place import join_ranks, torch_device
from interlace.models.loading import empty_model
from interlace.models.size import context_length
from interlace.rollouts.role_groups import ActorGroup, RolloutGroup
from interlace.run.launch import (
    ModelSources,
    instance_spec,
    launch_instances,
    revival_rule,
    rollout_source,
    wrap_engine,
)
from interlace.run.make_engines import EngineSource, Wrap, count_drawn_ids, load_source, make_rollout_engine
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.memory import forecast_run
from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import WorkerContext
from interlace.schedule.placement import role_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from interlace.engines.train import TrainEngine


async def launch_engines(cluster: Cluster, recipe: Recipe, *, wrap: Wrap | None = None) -> list[RolloutGroup]:
    """Starts the rollout engines alone, to serve the recipe's model. wrap: replaces each engine by another."""
    from interlace.workers.rollout import RolloutWorker

    context = context_length(empty_model(recipe.model).config)
    longest = create_kind(recipe.rollout).longest_sequence(context)
    source = EngineSource(recipe=recipe, model=recipe.model, wrap=wrap, kv_needs=KVNeeds(longest=longest))
    worker = wrap_engine(RolloutWorker, partial(make_rollout_engine, source))
    return cast("list[RolloutGroup]", await launch_instances(cluster, recipe, role_named("rollout"), worker, 0))


def fix_addresses(recipe: Recipe) -> Recipe:
    """Returns a recipe with the addresses of `urls_file` and `urls_dns` in `rollout.urls`, and without these two.

    An engine finds its server by its number, also when its process starts again. Another line in the file would change
    the server of each later number.
    """
    kind = create_kind(recipe.rollout)
    if not isinstance(kind, AddressKind) or not kind.urls:
        return recipe
    rollout = kind.config.model_copy(update={"urls": kind.urls, "urls_file": None, "urls_dns": None})
    return recipe.model_copy(update={"rollout": rollout})


async def launch_joiner(cluster: Cluster, sources: ModelSources, number: int, url: str | None) -> RolloutGroup:
    """Starts one more engine of a run. number: of the instance, which places it. url: of a server that runs."""
    from interlace.workers.rollout import RolloutWorker

    recipe, role = sources.recipe, role_named("rollout")
    places = cluster.place(role.name)
    if url is None and number >= len(places):
        raise UserError(f"engine {number}: the placement has {len(places)} engines, counted from 0.")
    memory = forecast_run(recipe, cluster.devices, sources.longest_prompt)
    source = replace(rollout_source(sources, memory), url=url)
    worker = wrap_engine(RolloutWorker, partial(make_rollout_engine, source))
    devices = () if url else places[number]
    spec = instance_spec(recipe, role, number, devices, worker)
    return cast(RolloutGroup, await cluster.launch(replace(spec, revival=revival_rule(recipe, role, devices))))


async def launch_warmup(cluster: Cluster, recipe: Recipe) -> ActorGroup:
    """Starts the worker that is trained on examples, on the devices of the actor."""
    from interlace.workers.actor import ActorWorker

    worker = wrap_engine(ActorWorker, partial(make_warmup_engine, EngineSource(recipe=recipe, model=recipe.model)))
    spec = instance_spec(recipe, role_named("actor"), 0, cluster.place("actor")[0], worker)
    return cast(ActorGroup, await cluster.launch(replace(spec, name="warmup")))


def make_warmup_engine(source: EngineSource, context: WorkerContext) -> "tuple[TrainEngine, PreTrainedTokenizerBase]":
    """Makes the engine of supervised warm-up."""
    import torch

    from interlace.engines.train import TrainEngine, sft_loss

    warmup = source.recipe.warmup
    if warmup is None:
        raise ValueError("the recipe has no warm-up")
    loaded = load_source(source, context, trained=True)
    config = TrainConfig(
        tokens_per_microbatch=source.recipe.tokens_per_microbatch,
        num_ids=count_drawn_ids(source.recipe, loaded.tokenizer),
    )
    # Cached by content, so the weights must not depend on how many cores the first run had.
    torch.set_num_threads(source.recipe.cluster.threads_per_worker or 1)
    engine = TrainEngine(
        loaded.model,
        loss=sft_loss,
        optimizer=warmup.optimizer,
        config=config,
        device=torch_device(context),
        ranks=join_ranks(context, source.recipe.actor),
    )
    return engine, loaded.tokenizer
