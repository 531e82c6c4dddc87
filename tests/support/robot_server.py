"""Policy servers of tiny policies in the dot simulator, as a user starts them."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import interlace
from interlace.core.types import Prompt, Request, Response, Sample, SampleKey
from interlace.models.loading import load_model
from interlace.robots.envs.fleet import EnvFleet
from interlace.robots.episodes.robot import RobotConfig, RobotEpisode, policy_actions
from interlace.robots.serving.client import PolicyClient
from interlace.rollouts.envs.spec import Observation
from interlace.rollouts.session import EpisodeSession, SessionLimits
from interlace.run.clusters.base import run_on
from interlace.run.host import policy_actions_of, sampling_of
from interlace.run.launch_services import launch_engines
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import recipe_prompts
from interlace.run.serve import start_pool
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule

CHUNK, HORIZON = 8, 24
DOT = {"tasks": ["near"], "horizon": HORIZON, "end_on_success": False}
HEADS = {
    "tokens": ("model.robot.bins=64", "model.robot.decoding=tokens", "sampling.max_new_tokens=8"),
    "parallel": ("model.robot.bins=64", "model.robot.decoding=parallel", "sampling.max_new_tokens=8"),
    "gaussian": ("model.robot.head=gaussian", "sampling.max_new_tokens=8"),
    "squashed": ("model.robot.head=squashed", "sampling.max_new_tokens=8"),
    "flow": ("model.robot.head=flow", "model.robot.flow={steps: 4}", "sampling.max_new_tokens=40"),
}
RULES = {"tokens": "forced", "parallel": "overwritten", "gaussian": "overwritten", "squashed": "overwritten",
         "flow": "guided"}  # fmt: skip


def settings_of(head: str, folder: Path) -> list[str]:
    """Settings of the recipe `robot-pendulum` for the dot simulator."""
    return [
        "model.robot={state_size: 2, state_tokens: 2, action_size: 1, chunk: 8, layers: 1, low: [-1.0], high: [1.0]}",
        "model.robot.head=tokens",
        "episode.features=[{of: [0, 1], scale: [0.8, 0.5]}]",
        "episode.env={family: 'tests.support.dot_simulator:Dot', num_envs: 2, workers: 1}",
        f"episode.env.settings={{tasks: [near], horizon: {HORIZON}, end_on_success: false}}",
        "task.starts={instructions: [push the puck down], train_size: 8, heldout_size: 4}",
        "cluster.devices=cpu:1",
        "cluster.threads_per_worker=1",
        f"model.cache_dir={folder}",
        *HEADS[head],
    ]


@contextmanager
def serving(head: str, folder: Path, *more: str) -> Iterator[interlace.Server]:
    """Serves a policy with random weights. more: further settings."""
    with interlace.serve("robot-pendulum", [*settings_of(head, folder), *more], port=0, policy=True) as server:
        yield server


def connect(server: interlace.Server, **options: float) -> PolicyClient:
    """Connects a robot."""
    return PolicyClient(server.url, server.api_key, **options)


def dot_observation(at: float = 0.1, mark: float = -0.4) -> Observation:
    """What the policy reads of the dot simulator."""
    return {"state": np.array([at, mark], np.float32)}


class SeenEpisode(RobotEpisode):
    """Episode that keeps the simulator's arrays of each turn."""

    def __init__(self, config: RobotConfig) -> None:
        super().__init__(config)
        self.seen: list[Observation] = []

    def inputs(self, observation: Observation, actions):  # type: ignore[no-untyped-def,override]
        self.seen.append(observation)
        return super().inputs(observation, actions)


def play_greedy(recipe: Recipe) -> tuple[Sequence[Observation], Sequence[np.ndarray]]:
    """Runs a greedy episode of a recipe. Returns the observation and the chunk [K, A] of each turn."""
    assert isinstance(recipe.episode, RobotConfig)
    config, actions = recipe.episode, policy_actions(policy_actions_of(recipe))
    episode, chunks = SeenEpisode(config), []
    prompt: Prompt = recipe_prompts(recipe).heldout[0]

    async def flow(cluster: Cluster) -> None:
        engines = await launch_engines(cluster, recipe)
        sampling = (await sampling_of(recipe, engines[0])).model_copy(update={"temperature": 0.0})
        pool, fleet = start_pool(cluster, engines, sampling), EnvFleet(config.env)

        async def ask(request: Request, *, who: str, **others: object) -> Response:
            [response] = await pool.complete([request], who=who)
            chunks.append(actions.decode(response.token_ids))
            return response

        limits = SessionLimits(actions=actions, simulators=fleet)
        session = EpisodeSession(cluster, ask, Sample(key=SampleKey(-2, 0), prompt=prompt), sampling, limits)
        session.begin()
        await episode.run(prompt, session)
        session.close()
        fleet.close()

    asyncio.run(run_on(recipe.cluster, Schedule(), flow))
    return episode.seen, chunks


def decode_greedily(recipe: Recipe, begun: Sequence[int], observation: Observation) -> list[int]:
    """Computes the most probable tokens of a chunk that begins with the given ones, each by a whole forward pass."""
    assert isinstance(recipe.episode, RobotConfig)
    model, actions = load_model(recipe.model).model, policy_actions(policy_actions_of(recipe))
    context = actions.context(recipe_prompts(recipe).heldout[0].token_ids.tolist())
    places = torch.tensor([place for place, token in enumerate(context) if token == actions.reads.placeholder])
    prepared = RobotEpisode(recipe.episode).inputs(observation, actions)
    inputs, tokens = {name: torch.from_numpy(array) for name, array in prepared.items()}, list(begun)
    while len(tokens) < actions.num_tokens:
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *tokens]]), inputs=inputs, input_places=places).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def load(head: str, folder: Path) -> Recipe:
    """Loads the recipe of a served policy."""
    return load_recipe("robot-pendulum", settings_of(head, folder))
