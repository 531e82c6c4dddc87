"""Advantages of recorded rollouts with chunks, truncation and episode changes equal plain loops."""

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from interlace.algorithms import create_algorithm
from interlace.core.messages import Message
from interlace.core.runs import Runs
from interlace.core.types import FINAL, FinishReason, Prompt, Sample, SampleGroup, SampleKey, SamplingParams
from interlace.data.starts import HELDOUT_FROM
from interlace.models.action_tokens import ActionTokens
from interlace.models.inputs import InputEmbedding
from interlace.robots.envs.fleet import EnvFleet
from interlace.robots.envs.load import EnvConfig
from interlace.robots.episodes.robot import ExpertHelp, RobotConfig, RobotEpisode
from interlace.rollouts.base import Turn
from interlace.rollouts.turns import turn_columns

CHUNK, HORIZON, GAMMA, LAM = 3, 20, 0.93, 0.9
WEIGHTS = np.array([0.4, -0.3, 0.8, 0.1])
"""A critic of CartPole's four numbers."""
READS = InputEmbedding(placeholder=50, per_observation=1, shapes={"state": (4,)})
ACTIONS = ActionTokens(
    chunk=CHUNK, low=np.array([-0.5], np.float32), high=np.array([1.5], np.float32), num_bins=2,
    query_ids=(60, 61, 62), reads=READS,
)  # fmt: skip


def value(state: np.ndarray) -> float:
    return float(np.float32(WEIGHTS @ np.asarray(state, np.float64).reshape(-1)))


@dataclass
class Scripted:
    """A session that answers with given actions, in an environment of a fleet."""

    fleet: EnvFleet
    script: Sequence[int]
    actions: ActionTokens = ACTIONS
    seed: int = 4
    params: SamplingParams = SamplingParams(max_new_tokens=CHUNK)
    turns: list[Turn] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    temperatures: set[float] = field(default_factory=set)
    """Temperatures of the turns."""

    @asynccontextmanager
    async def simulator(self, start, own=None):
        async with self.fleet.episode(start) as env:
            yield env

    async def generate(self, context, *, params, inputs, query_ids, options) -> Turn:
        assert options.is_trained == (params.temperature == self.params.temperature)
        self.temperatures.add(params.temperature)
        number = len(self.turns)
        ids = self.draw(number)
        self.turns.append(
            Turn(
                number=number, prompt_ids=np.asarray(context, np.int32), token_ids=ids,
                logprobs=np.zeros(len(ids), np.float32), versions=Runs.repeated(0, len(ids)), text="",
                finish_reason=FinishReason.LENGTH, message=Message(role="assistant", content=""), inputs=inputs,
                query_ids=np.asarray(query_ids, np.int32),
            )
        )  # fmt: skip
        return self.turns[-1]

    def draw(self, number: int) -> np.ndarray:
        """Returns the tokens of a turn."""
        return np.array(self.script[number * CHUNK : (number + 1) * CHUNK], np.int32)

    def reward(self, turn: Turn, amount: float) -> None:
        self.rewards[turn.number] = amount

    def waiting(self, _: str) -> nullcontext:
        return nullcontext()


def script(start: int) -> list[int]:
    """Actions that keep the pole up for a while; the start decides how long."""
    draw = np.random.default_rng(start)
    if start % 2:
        return list(draw.integers(2, size=HORIZON + CHUNK))
    return [place % 2 for place in range(HORIZON + CHUNK)]


async def play_episode(config: RobotConfig, session: Scripted, start: int) -> Sample:
    """Returns the sample of an episode. start: its initial state."""
    prompt = Prompt(
        uid=str(start), token_ids=np.array([1], np.int32), text="", answer="",
        metadata={"task": 0, "init_state": start},
    )  # fmt: skip
    outcome = await RobotEpisode(config).run(prompt, session)
    columns = turn_columns(prompt, session.turns, outcome, session.rewards, ())
    sample = Sample(key=SampleKey(0, start), prompt=prompt, segments=columns["segments"])
    return replace(sample, reward=columns["outcome"].reward)


def recorded(starts: Sequence[int], *, bootstrap: bool) -> list[Sample]:
    """Samples of episodes that one environment runs one after another."""
    settings = {"tasks": ["CartPole-v1"], "horizon": HORIZON}
    env = EnvConfig(family="gymnasium", num_envs=1, settings=settings)
    config = RobotConfig(env=env, reward="return", bootstrap=bootstrap)

    async def play() -> list[Sample]:
        fleet = EnvFleet(env)
        await fleet.start()
        try:
            return [await one(fleet, start) for start in starts]
        finally:
            fleet.close()

    async def one(fleet: EnvFleet, start: int) -> Sample:
        sample = await play_episode(config, Scripted(fleet, script(start)), start)
        return replace(sample, values=np.concatenate([values(sample, place) for place in range(len(sample.segments))]))

    return asyncio.run(play())


def values(sample: Sample, place: int) -> np.ndarray:
    """The critic's values of a segment's tokens: of the observation before it, and nonsense at other tokens."""
    segment = sample.segments[place]
    found = np.full(len(segment.token_ids), 99.0, np.float32)
    if place and segment.inputs is None:
        found[0] = value(sample.segments[place - 1].inputs["state"])
    return found


def direct(start: int, *, bootstrap: bool) -> tuple[list[float], int, bool]:
    """Advantage of each chunk by a plain loop over gymnasium itself; actions taken; whether the horizon ended it."""
    gymnasium = pytest.importorskip("gymnasium")
    env = gymnasium.make("CartPole-v1", max_episode_steps=-1)
    state, _ = env.reset(seed=start)
    rewards, seen, taken, over = [], [], 0, False
    while not over and taken < HORIZON:
        seen.append(value(state))
        rewards.append(0.0)
        for action in script(start)[taken : taken + CHUNK]:
            state, reward, over, _, _ = env.step(action)
            rewards[-1] += float(reward)
            taken += 1
            if over or taken == HORIZON:
                break
    # The horizon cuts the last chunk, which then lasts less than a turn.
    share = ((taken - 1) % CHUNK + 1) / CHUNK
    after = 0.0 if over or not bootstrap else GAMMA ** (share - 1) * value(state)
    deltas = [r + GAMMA * v - before for r, v, before in zip(rewards, [*seen[1:], after], seen, strict=True)]
    return [sum((GAMMA * LAM) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))], taken, not over


@pytest.mark.parametrize("bootstrap", [True, False])
def test_advantages_equal_a_direct_computation(bootstrap: bool) -> None:
    pytest.importorskip("gymnasium")
    starts = [2, 3, 4, 5]
    ppo = create_algorithm("ppo", {"advantage_of": "turn", "gamma": GAMMA, "lam": LAM})
    ends = set()
    for start, sample in zip(starts, recorded(starts, bootstrap=bootstrap), strict=True):
        wanted, taken, is_cut_off = direct(start, bootstrap=bootstrap)
        [found] = ppo.advantages(SampleGroup(gid=0, step=0, samples=(sample,))).advantages
        trained = sample.loss_mask
        assert trained.sum() == taken, "actions after the end of an episode are not trained"
        of_tokens = np.repeat(wanted, CHUNK)[:taken]
        np.testing.assert_allclose(found[trained], of_tokens, rtol=1e-4, atol=1e-5)
        ends.add(is_cut_off)
    assert ends == {True, False}, "the horizon and the task itself both end an episode"


DOT = EnvConfig(
    family="tests.support.dot_simulator:Dot", num_envs=1,
    settings={"tasks": ["near"], "horizon": 12, "end_on_success": False},
)  # fmt: skip
MOVES = ActionTokens(
    chunk=CHUNK, low=-np.ones(1, np.float32), high=np.ones(1, np.float32), num_bins=3,
    reads=InputEmbedding(placeholder=50, per_observation=1, shapes={"state": (2,)}),
)  # fmt: skip


def moved(config: RobotConfig, script: Sequence[int], start: int = 0) -> tuple[Sample, set[float]]:
    """Returns the sample of an episode of the dot simulator, and the temperatures of its turns."""

    async def play() -> tuple[Sample, set[float]]:
        fleet = EnvFleet(DOT)
        await fleet.start()
        try:
            session = Scripted(fleet, script, actions=MOVES)
            return await play_episode(config, session, start), session.temperatures
        finally:
            fleet.close()

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("expert", "start", "temperature"),
    [
        (ExpertHelp(takes_over_above=0.5), 0, 0.0),
        (ExpertHelp(takes_over_above=0.5), HELDOUT_FROM, 1.0),
        (ExpertHelp(), 0, 1.0),
        (None, 0, 1.0),
    ],
)
def test_the_most_probable_chunk_decides_whether_an_expert_takes_over(
    expert: ExpertHelp | None, start: int, temperature: float
) -> None:
    _, temperatures = moved(RobotConfig(env=DOT, expert=expert), [1] * 12, start)
    assert temperatures == {temperature}


def test_a_success_that_does_not_end_its_episode_is_not_valued_at_the_horizon() -> None:
    def is_valued(script: Sequence[int], reward: str) -> bool:
        sample, _ = moved(RobotConfig(env=DOT, reward=reward, bootstrap=True), script)  # type: ignore[arg-type]
        assert sample.reward is not None
        if reward == "success":
            assert sample.reward == float(2 in script)
        return sample.segments[-1].kind == FINAL

    still, across = [1] * 12, [2] * 12  # at the start, and across the mark to the end of the track
    assert is_valued(still, "success") and not is_valued(across, "success")
    assert is_valued(across, "return"), "rewards of the simulator follow a success"
