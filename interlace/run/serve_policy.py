"""Serves the policy of a robot: a run's, or a published one, over WebSocket."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import IntArray, Request, Response
from interlace.data.formatting import Row, render, to_prompts
from interlace.engines.rollout.config import NativeConfig
from interlace.models.action_tokens import ActionTokens
from interlace.models.loading import load_tokenizer
from interlace.observe.run_folder import RunFolder
from interlace.robots.episodes.robot import RobotConfig, policy_actions
from interlace.robots.serving.limits import ServingSettings
from interlace.robots.serving.policy import ServedPolicy, TurnPolicy, describe_turns
from interlace.robots.serving.schema import ActRequest, PolicySchema
from interlace.robots.serving.server import InterventionRecorder, PolicyServer
from interlace.run.clusters.base import run_on
from interlace.run.host import policy_actions_of, sampling_of
from interlace.run.launch_services import launch_engines
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import read_overrides
from interlace.run.robot_spaces import read_spaces
from interlace.run.serve import ServeOptions, Serving, start_pool
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIX = "policy."
"""Beginning of the server's settings among the overrides of a recipe."""
KEPT_INSTRUCTIONS = 256
"""Instructions whose tokens are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptions(ServeOptions):
    """Options of a policy server; `admin_key` has no use."""

    settings: ServingSettings
    run: RunFolder | None = None
    """Run whose stored shapes are read instead of a simulator's; None for a recipe or a published policy."""


def split_policy_settings(overrides: Sequence[str]) -> tuple[ServingSettings, list[str]]:
    """Splits the settings `policy.KEY=VALUE` of a server from the recipe's. Raises UserError for wrong ones."""
    data = read_overrides([each.removeprefix(PREFIX) for each in overrides if each.startswith(PREFIX)])
    return ServingSettings.parse(data, where="policy"), [each for each in overrides if not each.startswith(PREFIX)]


def serve_policy(
    source: Recipe | Path, options: PolicyOptions, *, on_ready: Callable[[Serving], None], stop: asyncio.Event
) -> None:
    """Serves a policy until `stop` is set. source: recipe with the model to serve, or a published policy's folder.

    on_ready: called when the server listens. Raises UserError for a source that is no robot's policy.
    """
    recorder = None
    if options.settings.record is not None:
        recorder = InterventionRecorder(Path(options.settings.record), fps=options.settings.control_hz)

    async def listen(policy: ServedPolicy) -> None:
        server = PolicyServer(policy, api_key=options.api_key, limits=options.settings.limits, recorder=recorder)
        await policy.act(make_blank_request(server.schema))  # the first chunk of a process takes longer
        url = await server.start(options.host, options.port)
        try:
            on_ready(Serving(url=url, api_key=server.api_key, admin_key=""))
            await stop.wait()
        finally:
            await server.close()

    if isinstance(source, Path):
        asyncio.run(_serve_folder(source, options, listen))
        return
    config, actions = _check_recipe(source), policy_actions(policy_actions_of(source))
    starts = source.task.starts
    schema = describe_turns(
        source.model.path,
        config,
        read_spaces(config.env, options.run),
        actions,
        instructions=starts.instructions if starts else (),
        control_hz=options.settings.control_hz,
    )
    if options.settings.limits is not None:
        options.settings.limits.check_size(schema.size)

    async def run(cluster: Cluster) -> None:
        policy = await _start_policy(cluster, source, schema, actions, samples=options.settings.sample)
        with cluster.waits.operation(who="server", what="robots"):
            await listen(policy)

    asyncio.run(run_on(source.cluster, Schedule(), run))


def _check_recipe(recipe: Recipe) -> RobotConfig:
    """Returns the settings of a recipe's episodes. Raises UserError if they are not a robot's."""
    if not isinstance(recipe.episode, RobotConfig):
        raise UserError(
            f"episode {recipe.episode.name!r} is not a robot's, so its model gives no actions. Serve it without "
            "--policy, or name a run of a robot's recipe."
        )
    if not isinstance(recipe.rollout, NativeConfig):
        raise UserError("a robot's policy is served by the native engine alone. Set rollout=native.")
    return recipe.episode


async def _serve_folder(
    folder: Path, options: PolicyOptions, listen: Callable[[ServedPolicy], Awaitable[None]]
) -> None:
    from interlace.robots.serving.published import PublishedPolicy

    policy = PublishedPolicy(folder, options.settings.control_hz, samples=options.settings.sample)
    try:
        await listen(policy)
    finally:
        policy.close()


async def _start_policy(
    cluster: Cluster, recipe: Recipe, schema: PolicySchema, actions: ActionTokens, *, samples: bool
) -> TurnPolicy:
    """Starts the engines of a recipe's policy."""
    engines = await launch_engines(cluster, recipe)
    sampling = await sampling_of(recipe, engines[0])
    pool = start_pool(cluster, engines, sampling)

    async def ask(request: Request) -> Response:
        [response] = await pool.complete([request], who=f"robot {request.owner.gid}")
        return response

    return TurnPolicy(
        schema,
        _check_recipe(recipe),
        actions,
        sampling if samples else sampling.model_copy(update={"temperature": 0.0}),
        encode_prompt=_make_encoder(recipe, load_tokenizer(recipe.model)),
        ask=ask,
    )


def _make_encoder(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> Callable[[str], IntArray]:
    """Returns the function from an instruction to the tokens of its prompt, written as in training."""
    style = recipe.task.format

    @lru_cache(KEPT_INSTRUCTIONS)
    def encode(instruction: str) -> IntArray:
        row = Row(uid="robot", origin="a robot's prompt", prompt=instruction, answer="")
        [prompt] = to_prompts([row], [render(row, style)], style, tokenizer)
        return prompt.token_ids

    return encode


def make_blank_request(schema: PolicySchema) -> ActRequest:
    """Returns a request of zeros that fits a schema. Axes of any size have 64 places."""
    arrays = {
        name: np.zeros([64 if size < 0 else size for size in field.shape], field.dtype)
        for name, field in schema.observation.items()
    }
    prompt = schema.known_instructions[0] if schema.known_instructions else "reach the goal"
    return ActRequest(observation=arrays, prompt=prompt, prefix=np.zeros((0, schema.size), np.float32), seed=0)
