"""Demonstrations by a simulator's scripted expert, which a robot's policy imitates before RL."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from interlace.core.config import Config
from interlace.core.random import stable_hash
from interlace.core.types import FloatArray, Prompt
from interlace.robots.envs.base import Start
from interlace.robots.envs.fleet import EnvFleet
from interlace.robots.envs.load import EnvConfig
from interlace.robots.envs.spec import Observation
from interlace.robots.episodes.robot import TASK

DEMONSTRATED_FROM = 700_000_000
"""First initial state reserved for demonstrations; it is used neither for training nor for evaluation."""


class ExpertConfig(Config):
    """Settings of demonstrations for a warm-up."""

    episodes: int = Field(ge=1)
    """Demonstrations per instruction."""
    noise: tuple[float, ...] = ()
    """[A] standard deviations of the noise on the executed actions. If empty, no noise. The policy imitates the
    expert's clean action, so it also learns to recover (DART, arXiv 1703.09327).
    """
    demonstration_horizon: int | None = Field(default=None, ge=1)
    """Actions per demonstration. If None, as many as in an episode."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demonstrated:
    """One state of a demonstration, with the expert's next actions."""

    prompt: Prompt
    observation: Observation
    actions: FloatArray
    """[K, A] next actions of the expert; after the end of the demonstration, its last action is repeated."""


async def demonstrate(
    config: ExpertConfig, env: EnvConfig, prompts: Sequence[Prompt], chunk: int, seed: int
) -> list[Demonstrated]:
    """Records demonstrations. The result depends only on the seed. prompts: one per instruction. chunk: K.

    Raises UserError if a task has no scripted expert.
    """
    settings = dict(env.settings)
    if config.demonstration_horizon is not None:
        settings["horizon"] = config.demonstration_horizon
    fleet = EnvFleet(env.model_copy(update={"settings": settings}))
    try:
        await fleet.start()
        asked = [(prompt, number) for prompt in prompts for number in range(config.episodes)]
        found = await asyncio.gather(*[_record(fleet, config, prompt, n, chunk, seed) for prompt, n in asked])
    finally:
        fleet.close()
    return [one for episode in found for one in episode]


async def _record(
    fleet: EnvFleet, config: ExpertConfig, prompt: Prompt, number: int, chunk: int, seed: int
) -> list[Demonstrated]:
    task = int(str(prompt.metadata[TASK]))
    state = DEMONSTRATED_FROM + stable_hash("demonstration", seed, task, number) % 100_000_000
    draw = np.random.default_rng(stable_hash("expert noise", seed, task, number))
    observations, actions = [], []
    async with fleet.episode(Start(task=task, init_state=state, seed=number)) as env:
        while True:
            clean = np.asarray(await env.expert_action(), np.float32)
            observations.append(env.observation)
            actions.append(clean)
            noise = draw.normal(size=clean.shape) * np.asarray(config.noise or (0.0,))
            done = await env.chunk_step((clean + noise).astype(np.float32)[None])
            if done.ended:
                break
    ahead = np.stack([*actions, *[actions[-1]] * (chunk - 1)])
    return [
        Demonstrated(prompt=prompt, observation=seen, actions=ahead[place : place + chunk])
        for place, seen in enumerate(observations)
    ]


def first_of_each_task(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt per task, in the order of task ids."""
    found: dict[int, Prompt] = {}
    for prompt in prompts:
        found.setdefault(int(str(prompt.metadata[TASK])), prompt)
    return [prompt for _, prompt in sorted(found.items())]
