"""Starts what a run needs beside its usual workers: engines for a server, engines that join, services that score."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from interlace.core.errors import UserError
from interlace.engines.rollout.kinds import EngineSite, create_kind
from interlace.engines.train.place import torch_name
from interlace.jobs.launch import (
    EngineSource,
    ModelSources,
    RoleWorker,
    Wrap,
    instance_spec,
    launch_instances,
    load_source,
    make_reference_engine,
    make_rollout_engine,
    wrap_engine,
)
from interlace.recipes.config import Recipe
from interlace.recipes.layout import num_threads
from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import WorkerContext
from interlace.schedule.roles import role_named
from interlace.stages.role_groups import RolloutGroup

if TYPE_CHECKING:
    from interlace.workers.scoring import ScoringService


def reference_worker(initial: EngineSource) -> RoleWorker:
    """Makes the reference: a model on a rank of the run, or the client of services."""
    from interlace.workers.reference import ReferenceWorker
    from interlace.workers.scoring import ScoringWorker

    service = initial.recipe.reference.service
    if service is None:
        return wrap_engine(ReferenceWorker, partial(make_reference_engine, initial))
    worker = wrap_engine(ScoringWorker, partial(make_scoring_services, initial))
    return replace(worker, on_host=create_kind(service).num_addresses is not None)


async def launch_engines(cluster: Cluster, recipe: Recipe, *, wrap: Wrap | None = None) -> list[RolloutGroup]:
    """Starts the rollout engines alone, to serve the recipe's model. wrap: replaces each engine by another."""
    from interlace.workers.rollout import RolloutWorker

    source = EngineSource(recipe=recipe, model=recipe.model, wrap=wrap)
    worker = wrap_engine(RolloutWorker, partial(make_rollout_engine, source))
    return cast("list[RolloutGroup]", await launch_instances(cluster, recipe, role_named("rollout"), worker, 0))


async def launch_joiner(cluster: Cluster, sources: ModelSources, number: int, url: str | None) -> RolloutGroup:
    """Starts one more engine of a run. number: of the instance, which places it. url: of a server that runs."""
    from interlace.workers.rollout import RolloutWorker

    recipe, role = sources.recipe, role_named("rollout")
    places = cluster.place(role.name)
    if url is None and number >= len(places):
        raise UserError(f"engine {number}: the placement has {len(places)} engines, counted from 0.")
    source = EngineSource(recipe=recipe, model=sources.policy, logs=sources.logs, url=url)
    worker = wrap_engine(RolloutWorker, partial(make_rollout_engine, source))
    return cast(
        RolloutGroup, await cluster.launch(instance_spec(recipe, role, number, () if url else places[number], worker))
    )


def make_scoring_services(source: EngineSource, context: WorkerContext) -> "Sequence[ScoringService]":
    """Connects to the services that compute the reference's log-probs, or starts one on the reference's devices."""
    recipe, loaded, service = source.recipe, load_source(source, context), source.recipe.reference.service
    if service is None:
        raise ValueError("the recipe has no scoring service")
    kind = create_kind(service)
    site = EngineSite(
        model=source.model,
        devices=tuple(map(torch_name, context.devices or ("cpu",))),
        seed=recipe.seed,
        num_threads=num_threads(recipe, len(context.devices)),
        logs=source.logs,
    )
    count = 1 if kind.num_addresses is None else kind.num_addresses
    made = [kind.create(loaded, replace(site, instance=number)) for number in range(count)]
    return cast("Sequence[ScoringService]", made)
