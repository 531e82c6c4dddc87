"""Episodes outside the flow, for evaluations."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from interlace.core.causes import SampleFailure
from interlace.core.types import NO_GROUP, Prompt, Request, Response, RewardResult, Sample, SampleKey, SamplingParams
from interlace.rollouts.base import Episode
from interlace.rollouts.engine_jobs import OnDraft
from interlace.rollouts.generate import run_sample
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.session import EpisodeSession, SessionLimits
from interlace.rollouts.stream import Columns
from interlace.runtime.cluster import Cluster


class _Outside:
    """Client of a session that belongs to no sample of the flow."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def __call__(
        self, request: Request, *, who: str, what: str, on_draft: OnDraft | None = None, patience_s: float = math.inf
    ) -> Response:
        del patience_s  # a publication waits for the evaluation, so none delays it
        asked = [replace(request, may_continue=False)]
        [response] = await self._pool.complete(asked, who=f"{who}, {what}", on_draft=on_draft)
        return response


class Player:
    """Runs episodes outside the flow.

    Consumes: pairs of a prompt and a sample index (`play`).
    Produces: samples, which are not trained on.
    Waits for: responses of the pool, without the gate and without a budget, and the tools of episodes.
    Released by: the responses. All episodes of a call run concurrently.
    """

    def __init__(self, cluster: Cluster, pool: EnginePool, episode: Episode, limits: SessionLimits) -> None:
        self._cluster, self._pool, self._episode, self._limits = cluster, pool, episode, limits

    async def play(self, asked: Sequence[tuple[Prompt, int]], params: SamplingParams) -> list[Sample]:
        """Runs an episode for each prompt and index. `outcome` contains the episode's reward, if it returned one.

        An exception of an episode becomes the failure of its outcome. A lost episode starts again, as in the flow.
        """
        return list(await asyncio.gather(*[self._play_episode(prompt, index, params) for prompt, index in asked]))

    async def _play_episode(self, prompt: Prompt, index: int, params: SamplingParams) -> Sample:
        sample = Sample(key=SampleKey(NO_GROUP, index), prompt=prompt)
        make = partial(EpisodeSession, self._cluster, _Outside(self._pool), params=params, limits=self._limits)
        found = await run_sample(self._episode, make, sample)
        if isinstance(found, SampleFailure):
            found = Columns(outcome=RewardResult(failure=found.reason, cause=found.cause))
        return replace(sample, **found)  # type: ignore[arg-type]  # a stage's columns are untyped
