"""Turns: common beginnings of contexts, and the distribution that a turn is sampled from."""

import asyncio
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.core.types import NO_GROUP, FinishReason, Prompt, Request, Response, Sample, SampleKey
from interlace.rollouts.session import EpisodeSession
from interlace.rollouts.turns import count_common
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule
from tests.support.episode_runs import PARAMS

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(TOKENS, TOKENS)
def test_equal_tokens_are_counted_up_to_the_first_difference(one: list[int], other: list[int]) -> None:
    expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    assert count_common(np.asarray(one, np.int32), np.asarray(other, np.int32)) == expected


def test_a_trained_turn_is_sampled_from_the_distribution_of_the_run() -> None:
    """Training recomputes log-probs of that distribution. An evaluation may sample from another."""

    async def answer(request: Request, **_: object) -> Response:
        return Response(
            request=request, token_ids=[7], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP, text="a"
        )

    async def flow(cluster: Cluster) -> None:
        prompt = Prompt(uid="p", token_ids=np.arange(3, dtype=np.int32), text="", answer="")
        shorter = PARAMS.model_copy(update={"max_new_tokens": 1})
        hotter = PARAMS.model_copy(update={"temperature": PARAMS.temperature + 1})
        for gid in (0, NO_GROUP):
            session = EpisodeSession(cluster, answer, Sample(key=SampleKey(gid, 0), prompt=prompt), PARAMS)
            session.begin()
            await session.generate([1], params=shorter)
            if gid == NO_GROUP:
                await session.generate([1], params=hotter)
            else:
                with pytest.raises(UserError, match=r"temperature=2.0, and the run samples with temperature=1.0"):
                    await session.generate([1], params=hotter)
            session.close()

    asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))
