"""The horizon cuts the last chunk of a flow policy: its advantages equal a plain loop."""

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import pytest

from interlace.algorithms import create_algorithm
from interlace.core.types import FINAL, Sample, SampleGroup
from interlace.models.action_tokens import ActionTokens
from interlace.models.config import FlowConfig
from interlace.models.flow import FlowSchedule
from interlace.models.inputs import InputEmbedding
from interlace.robots.envs.fleet import EnvFleet
from interlace.robots.envs.load import EnvConfig
from interlace.robots.episodes.robot import RobotConfig
from interlace.rollouts.base import Turn
from tests.unit.robots.episodes.test_robot_advantages import Scripted, play_episode

CHUNK, HORIZON, GAMMA, LAM = 3, 7, 0.9, 0.8
FLOW = FlowSchedule(config=FlowConfig(steps=2, padded_size=2), chunk=CHUNK, size=1)
ACTIONS = ActionTokens(
    chunk=CHUNK, low=np.array([-2], np.float32), high=np.array([2], np.float32), num_bins=0, flow=FLOW,
    query_ids=tuple(range(60, 60 + FLOW.num_tokens)), reads=InputEmbedding(placeholder=50, per_observation=1,
    shapes={"state": (3,)}),
)  # fmt: skip


@dataclass
class Flowing(Scripted):
    """A session that answers with chains of numbers."""

    actions: ActionTokens = ACTIONS

    def draw(self, number: int) -> np.ndarray:
        return np.random.default_rng(number).normal(size=FLOW.num_tokens).astype(np.float32).view(np.int32)


def record() -> tuple[Sample, list[Turn]]:
    env = EnvConfig(family="gymnasium", num_envs=1, settings={"tasks": ["Pendulum-v1"], "horizon": HORIZON})
    config = RobotConfig(env=env, reward="return", bootstrap=True)

    async def play() -> tuple[Sample, list[Turn]]:
        fleet = EnvFleet(env)
        await fleet.start()
        try:
            session = Flowing(fleet, ())
            return await play_episode(config, session, start=2), session.turns
        finally:
            fleet.close()

    return asyncio.run(play())


def test_a_cut_flow_chunk_counts_as_its_executed_share() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    sample, turns = record()
    assert len(turns) == 3, "chunks of 3, 3 and 1 actions"
    values = [np.full(len(segment.token_ids), 99.0, np.float32) for segment in sample.segments]
    first = [place for place, segment in enumerate(sample.segments) if segment.inputs is None]
    of_turns = [0.5, -1.0, 2.0, 7.0]
    for place, value in zip(first, of_turns, strict=True):
        values[place][0] = value
    sample = replace(sample, values=np.concatenate(values))
    assert sample.segments[-1].kind == FINAL
    ppo = create_algorithm("ppo", {"advantage_of": "turn", "gamma": GAMMA, "lam": LAM})
    [found] = ppo.advantages(SampleGroup(gid=0, step=0, samples=(sample,))).advantages

    env = gymnasium.make("Pendulum-v1", max_episode_steps=-1)
    env.reset(seed=2)
    rewards = []
    for turn in turns:
        chain = turn.token_ids.view(np.float32).reshape(FLOW.num_states, CHUNK, FLOW.padded_size)
        chunk = np.clip(2 * chain[-1, :, 0], -2, 2)[: HORIZON - CHUNK * turn.number]
        rewards.append(sum(float(env.step(np.array([each]))[1]) for each in chunk))
    after = [*of_turns[1:3], GAMMA ** (1 / CHUNK - 1) * of_turns[3]]
    deltas = [r + GAMMA * v - before for r, v, before in zip(rewards, after, of_turns[:3], strict=True)]
    wanted = [sum((GAMMA * LAM) ** k * d for k, d in enumerate(deltas[t:])) for t in range(3)]
    trained = sample.loss_mask
    assert trained.sum() == FLOW.num_states * FLOW.padded_size * HORIZON, "in each state the executed actions alone"
    sizes = [FLOW.num_states * FLOW.padded_size * count for count in (3, 3, 1)]
    np.testing.assert_allclose(found[trained], np.repeat(wanted, sizes), rtol=1e-4, atol=1e-5)
