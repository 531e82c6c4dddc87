"""Turns: common beginnings of contexts, the distribution that a turn is sampled from, and the limits of episodes."""

import asyncio
from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.core.trajectory import count_common
from interlace.core.types import NO_GROUP, FinishReason, Prompt, Request, Response, Sample, SampleKey
from interlace.rollouts.session import EpisodeSession
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.run.host import session_limits
from interlace.run.recipe.load import load_recipe
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule
from tests.support.episode_runs import PARAMS

PROMPT = Prompt(uid="p", token_ids=np.arange(3, dtype=np.int32), text="", answer="")
TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(TOKENS, TOKENS)
def test_equal_tokens_are_counted_up_to_the_first_difference(one: list[int], other: list[int]) -> None:
    expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    assert count_common(np.asarray(one, np.int32), np.asarray(other, np.int32)) == expected


async def answer(request: Request, **_: object) -> Response:
    return Response(
        request=request, token_ids=[7], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP, text="a"
    )


def test_a_trained_turn_is_sampled_from_the_distribution_of_the_run() -> None:
    """Training recomputes log-probs of that distribution. An evaluation may sample from another."""

    async def flow(cluster: Cluster) -> None:
        shorter = PARAMS.model_copy(update={"max_new_tokens": 1})
        hotter = PARAMS.model_copy(update={"temperature": PARAMS.temperature + 1})
        for gid in (0, NO_GROUP):
            session = EpisodeSession(cluster, answer, Sample(key=SampleKey(gid, 0), prompt=PROMPT), PARAMS)
            session.begin()
            await session.generate([1], params=shorter)
            if gid == NO_GROUP:
                await session.generate([1], params=hotter)
            else:
                with pytest.raises(UserError, match=r"temperature=2.0, and the run samples with temperature=1.0"):
                    await session.generate([1], params=hotter)
            session.close()

    asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))


def test_messages_for_clients_name_turns_and_no_internal_requests() -> None:
    async def refuse(request: Request, **_: object) -> Response:
        return replace(await answer(request), failure=f"request {request.id}: the prompt is too long")

    async def flow(cluster: Cluster) -> None:
        messages = []
        for ask in (refuse, answer):
            session = EpisodeSession(cluster, ask, Sample(key=SampleKey(-2, 0), prompt=PROMPT), PARAMS)
            session.begin()
            for _ in range(2):
                try:
                    await session.generate([1], number=0)
                except UserError as error:
                    messages.append(str(error))
            session.close()
        again = "turn 0 was requested before. Give each call a separate number."
        refused = "the engine refused turn 0: the prompt is too long"
        assert messages == [refused, refused, again], "a refused turn may be requested again"

    asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))


def test_each_episode_of_a_mixture_has_the_limits_of_its_settings() -> None:
    others = "{t: {name: tools, tools: [calculator], max_turns: 3, timeout_s: 77}}"
    main = f"episode={{name: second_guess, max_turns: 2, timeout_s: 5, column: kind, others: {others}}}"
    limits = session_limits(load_recipe("second_guess", [main]), None, None, ())
    row = replace(PROMPT, metadata={"kind": "t"})
    assert limits.of(row).timeout_s == 77 and limits.of(PROMPT).timeout_s == 5

    async def flow(cluster: Cluster) -> None:
        for prompt, most in ((PROMPT, 2), (row, 3)):
            session = EpisodeSession(cluster, answer, Sample(key=SampleKey(0, 0), prompt=prompt), PARAMS, limits)
            session.begin()
            for _ in range(most):
                await session.limit_time(session.generate([1]))
            with pytest.raises(UserError, match=f"more than {most} turns"):
                await session.limit_time(session.generate([1]))
            session.close()

    asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))
