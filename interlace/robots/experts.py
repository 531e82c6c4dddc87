"""Demonstrations of a simulator's scripted expert or of a data set, which a robot's policy imitates before RL."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, NonNegativeFloat

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.types import FloatArray, Prompt
from interlace.robots.datasets.episodes import RecordedEpisode
from interlace.robots.datasets.load import content_of, open_dataset
from interlace.robots.envs.base import stack_observations
from interlace.robots.envs.fleet import EnvFleet
from interlace.robots.envs.load import EnvConfig
from interlace.robots.episodes.robot import TASK
from interlace.rollouts.envs.spec import EnvSpec, Observation, Start

DEMONSTRATED_FROM = 700_000_000
"""First initial state reserved for demonstrations; it is used neither for training nor for evaluation."""


class ExpertConfig(Config):
    """Settings of demonstrations to imitate."""

    episodes: int = Field(ge=1)
    """Demonstrations per instruction; of a data set, at most."""
    dataset: str | None = None
    """Data set with demonstrations of the instructions: a LeRobotDataset (v3), a folder of Minari, or an .hdf5 file of
    robomimic or LIBERO. Its episodes are imitated whole, as they were recorded. If None, a scripted expert of the
    simulator records them."""
    noise: tuple[NonNegativeFloat, ...] = ()
    """[A] standard deviations of the noise on the scripted expert's executed actions. If empty, no noise. The policy
    imitates the expert's clean action, so it also learns to recover (DART, arXiv 1703.09327)."""
    demonstration_horizon: int | None = Field(default=None, ge=1)
    """Actions per demonstration of the scripted expert, at least a chunk. If None, as many as in an episode."""

    @property
    def content(self) -> str:
        """Returns a text that changes with the content of the data set; empty without one."""
        return "" if self.dataset is None else content_of(Path(self.dataset))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demonstrated:
    """One state of a demonstration, with the expert's next actions."""

    prompt: Prompt
    observation: Observation
    actions: FloatArray
    """[K, A] next actions of the expert; after the end of the demonstration, its last action is repeated."""


async def demonstrate(
    config: ExpertConfig,
    env: EnvConfig,
    prompts: Sequence[Prompt],
    chunk: int,
    seed: int,
    *,
    section: str = "warmup.experts",
) -> list[Demonstrated]:
    """Returns the states of demonstrations: of a data set if the settings name one, else recorded now. The result
    depends only on the seed. prompts: one per instruction. chunk: K. section: key of the settings, for messages.

    Raises UserError if a task has no scripted expert, or the data set has no episode of an instruction.
    """
    if config.dataset is not None:
        setting = f"{section}.dataset={config.dataset}"
        recorded = [
            (prompt, episode)
            for prompt in prompts
            for episode in _list_demonstrated(config.dataset, config.episodes, prompt, setting)
        ]
    else:
        recorded = await record_demonstrations(config, env, prompts, seed)
    return [one for prompt, episode in recorded for one in _cut_episode(prompt, episode, chunk)]


async def record_demonstrations(
    config: ExpertConfig, env: EnvConfig, prompts: Sequence[Prompt], seed: int
) -> list[tuple[Prompt, RecordedEpisode]]:
    """Records demonstrations of a scripted expert. Arguments and errors as of demonstrate().

    Raises UserError for noise that does not fit the actions.
    """
    settings = dict(env.settings)
    if config.demonstration_horizon is not None:
        settings["horizon"] = config.demonstration_horizon
    fleet = EnvFleet(env.model_copy(update={"settings": settings}))
    try:
        _check_noise(config.noise, await fleet.start())
        asked = [(prompt, number) for prompt in prompts for number in range(config.episodes)]
        found = await asyncio.gather(
            *[_record_episode(fleet, config, prompt, number, seed) for prompt, number in asked]
        )
    finally:
        fleet.close()
    return [(prompt, episode) for (prompt, _), episode in zip(asked, found, strict=True)]


def _check_noise(noise: Sequence[float], spec: EnvSpec) -> None:
    """Raises UserError for noise that does not fit the simulator's actions."""
    if noise and spec.action.num_choices is not None:
        raise UserError(f"noise={list(noise)} is added to numbers, and an action here is one choice. Remove the noise.")
    if len(noise) not in (0, 1, spec.action.size):
        raise UserError(
            f"noise={list(noise)} has {len(noise)} numbers, and an action has {spec.action.size}. Give one number for "
            f"all, or {spec.action.size}."
        )


async def _record_episode(
    fleet: EnvFleet, config: ExpertConfig, prompt: Prompt, number: int, seed: int
) -> RecordedEpisode:
    task = int(str(prompt.metadata[TASK]))
    state = DEMONSTRATED_FROM + stable_hash("demonstration", seed, task, number) % 100_000_000
    draw = np.random.default_rng(stable_hash("expert noise", seed, task, number))
    observations, shown, executed, rewards = [], [], [], []
    async with fleet.episode(Start(task=task, init_state=state, seed=number)) as env:
        bounds = env.spec.action
        while True:
            clean = np.asarray(await env.expert_action(), np.float32)
            noise = draw.normal(size=clean.shape) * np.asarray(config.noise or (0.0,))
            observations.append(env.observation)
            shown.append(clean)
            executed.append(np.clip(clean + noise, bounds.low, bounds.high).astype(np.float32))
            done = await env.chunk_step(executed[-1][None])
            rewards.append(float(done.reward.sum()))
            if done.ended:
                break
    return RecordedEpisode(
        instruction=prompt.text,
        observations=stack_observations(observations),
        actions=np.stack(executed),
        shown=np.stack(shown) if config.noise else None,
        rewards=np.array(rewards, np.float32),
        terminated=(np.arange(len(rewards)) == len(rewards) - 1) & bool(done.terminated),
        success=bool(done.success),
    )


def _list_demonstrated(folder: str, episodes: int, prompt: Prompt, setting: str) -> list[RecordedEpisode]:
    """Returns the first episodes of an instruction in a data set. setting: key and value of the data set."""
    found: list[RecordedEpisode] = []
    instructions: set[str] = set()
    for episode in open_dataset(Path(folder)).episodes(cameras=None):
        instructions.add(episode.instruction)
        if episode.instruction == prompt.text:
            found.append(episode)
        if len(found) == episodes:
            break
    if not found:
        raise UserError(
            f"{setting} has no episode of the instruction {prompt.text!r}; its instructions are "
            f"{', '.join(map(repr, sorted(instructions)))}. Name one of them in task.starts.instructions."
        )
    return found


def _cut_episode(prompt: Prompt, episode: RecordedEpisode, chunk: int) -> list[Demonstrated]:
    """Returns each state of an episode with the next `chunk` actions to imitate."""
    ahead = np.concatenate([episode.imitated, np.repeat(episode.imitated[-1:], chunk - 1, 0)])
    return [
        Demonstrated(prompt=prompt, observation=episode.observation(step), actions=ahead[step : step + chunk])
        for step in range(len(episode))
    ]


def first_of_each_instruction(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt per task and instruction, in the order of task ids."""
    found: dict[tuple[int, str], Prompt] = {}
    for prompt in prompts:
        found.setdefault((int(str(prompt.metadata[TASK])), prompt.text), prompt)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]
