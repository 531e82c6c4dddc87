"""Tool calls and recomputed tokens are recorded even for agents of other frameworks."""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from interlace.core.errors import EpisodeFailedError, EpisodeLostError, RestartBudgetError
from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.core.recovery import Cause
from interlace.core.runs import Runs
from interlace.core.types import EMPTY_FLOAT, EMPTY_INT, RETRY, FinishReason, Prompt, Sample, SampleKey
from interlace.engines.rollout import NativeConfig
from interlace.rollouts.base import Episode, Session, Turn
from interlace.rollouts.generate import Player
from interlace.rollouts.session import NO_LIMITS
from interlace.rollouts.turn_record import TurnRecord
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule
from tests.support.episode_runs import PARAMS, OneEngine

PROMPT = Prompt(uid="p", token_ids=np.arange(3, 43, dtype=np.int32), text="", answer="")
ADD = ToolSpec(name="add")


def asks_for(*calls: ToolCall) -> Message:
    return Message(role="assistant", content="", tool_calls=calls)


def make_turn(number: int, message: Message) -> Turn:
    return Turn(
        number=number,
        prompt_ids=EMPTY_INT,
        token_ids=EMPTY_INT,
        logprobs=EMPTY_FLOAT,
        versions=Runs(()),
        finish_reason=FinishReason.STOP,
        text="",
        message=message,
    )


def says(call: str) -> Message:
    return Message(role="tool", content="2", tool_call_id=call)


def test_a_call_is_counted_once_with_the_time_to_the_request_that_brings_its_answer() -> None:
    record = TurnRecord(max_turns=None)
    first = asks_for(ToolCall(id="a", name="add"), ToolCall(id="b", name="", error="no JSON"))
    record.add(make_turn(0, first), [ADD], 1.0)
    record.request([Message(role="user", content="another branch")], 2.0)
    assert record.tool_uses == []
    record.request([first, says("a"), says("b")], 4.0)
    assert [(use.name, use.seconds, use.failed) for use in record.tool_uses] == [("add", 3.0, False), ("", 3.0, True)]
    record.add(make_turn(1, asks_for(ToolCall(id="c", name="divide"))), [ADD], 5.0)
    record.request(None, 5.5)
    assert [(use.name, use.seconds, use.failed) for use in record.tool_uses[2:]] == [("", 0.5, True)]
    record.add(make_turn(2, asks_for(ToolCall(id="d", name="add"))), [ADD], 6.0)
    record.request([says("a")], 7.0)
    assert len(record.tool_uses) == 3, "the last call was never answered, and the first is counted"


def test_a_call_of_a_turn_that_is_withdrawn_is_not_counted() -> None:
    record = TurnRecord(max_turns=None)
    record.add(make_turn(record.reserve(None), asks_for(ToolCall(id="a", name="add"))), [ADD], 1.0)
    record.withdraw(0)
    record.request(None, 2.0)
    assert record.tool_uses == []


class TwoTurns:
    async def run(self, prompt: Prompt, session: Session) -> float:
        turn = await session.generate(prompt.token_ids.tolist())
        await session.generate([*prompt.token_ids.tolist(), *turn.token_ids.tolist(), 7, 8])
        return 1.0


class TwoBranches:
    async def run(self, prompt: Prompt, session: Session) -> float:
        await session.generate(prompt.token_ids.tolist())
        await session.generate([*prompt.token_ids.tolist()[:30], 7, 8])
        return 1.0


@pytest.mark.parametrize(
    ("episode", "kept", "again"),
    [(TwoTurns(), True, 0), (TwoTurns(), False, 40 + 12 - 1), (TwoBranches(), False, 30)],
)
def test_history_counts_as_computed_again_where_it_was(episode: Episode, kept: bool, again: int) -> None:
    engine = OneEngine(config=NativeConfig(prefix_cache=kept))

    async def flow(cluster: Cluster) -> None:
        pool = await engine.pool(cluster, 1)
        await engine.play(pool, cluster, episode, [Sample(key=SampleKey(0, 0), prompt=PROMPT)])
        served = cluster.timeline._served
        assert sum(call.num_repeated_tokens for call in served) == again
        new = 40 if isinstance(episode, TwoBranches) else 40 + 1 + 2
        assert sum(call.num_prompt_tokens for call in served) == new + 2 * isinstance(episode, TwoBranches)

    asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))


@dataclass
class Lost:
    times: int
    attempts: list[int]

    async def run(self, prompt: Prompt, session: Session) -> float:
        self.attempts.append(prompt.attempt)
        await session.generate(prompt.token_ids.tolist())
        if len(self.attempts) <= self.times:
            raise EpisodeLostError("its process is gone")
        return 1.0


@pytest.mark.parametrize(("times", "reward", "failure"), [(2, 1.0, None), (9, 0.0, "its process is gone, 3 times")])
def test_an_evaluation_begins_a_lost_episode_again(times: int, reward: float, failure: str | None) -> None:
    episode = Lost(times, [])

    async def flow(cluster: Cluster) -> None:
        player = Player(cluster, await OneEngine().pool(cluster, 1), episode, NO_LIMITS)
        [sample] = await player.play([(PROMPT, 0)], PARAMS)
        assert sample.outcome is not None and (sample.outcome.reward, sample.outcome.failure) == (reward, failure)
        assert episode.attempts == [0, RETRY, 2 * RETRY] and sample.prompt.attempt == 0

    asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))


@dataclass
class Raising:
    error: Exception

    async def run(self, prompt: Prompt, session: Session) -> float:
        raise self.error


def test_an_exhausted_budget_of_restarts_ends_an_evaluation_and_a_failure_keeps_its_cause() -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine().pool(cluster, 1)
        failed = Raising(EpisodeFailedError("the page is gone", Cause.NETWORK))
        [sample] = await Player(cluster, pool, failed, NO_LIMITS).play([(PROMPT, 0)], PARAMS)
        assert sample.outcome is not None
        assert (sample.outcome.failure, sample.outcome.cause) == ("the page is gone", Cause.NETWORK)
        with pytest.raises(RestartBudgetError, match="too many restarts"):
            await Player(cluster, pool, Raising(RestartBudgetError("too many restarts")), NO_LIMITS).play(
                [(PROMPT, 0)], PARAMS
            )

    asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))
