"""Greedy baselines: the reward of one greedy response per group."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from interlace.core.errors import InterlaceError
from interlace.core.recovery import Cause, SampleFailure
from interlace.core.types import (
    GREEDY_INDEX,
    NO_BASELINE,
    Metrics,
    Prompt,
    Request,
    Sample,
    SampleKey,
    SamplingParams,
    TerminalEvent,
)
from interlace.observe.progress import brief
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.role_groups import RewardGroup
from interlace.rollouts.stream import BASELINE, OnFailed, Stream
from interlace.rollouts.turns import make_answered_sample
from interlace.runtime.cluster import Cluster
from interlace.stages.admission import Admission

MIN_FIRST = 4
"""Smallest number of first baselines that end a run if all of them fail."""


class GreedyBaseline:
    """Generates and scores one greedy response for each admitted group.

    Consumes: waves of admitted samples (`admitted`).
    Produces: the mark BASELINE on each sample of a group, and the baseline's reward (`take`). If the engine refuses
        the response or the baseline is not scored, the samples of its group end as `failed`.
    Waits for: the engine pool, then the reward role, in one task per group.
    Released by: the response and its score. It holds no row back.
    """

    def __init__(
        self,
        cluster: Cluster,
        pool: EnginePool,
        reward: RewardGroup,
        admission: Admission,
        sampling: SamplingParams,
        groups_per_step: int,
        on_failed: OnFailed,
    ) -> None:
        """on_failed: called with each sample that ends because its group's baseline failed."""
        self._on_failed = on_failed
        self._cluster, self._pool, self._reward, self._admission = cluster, pool, reward, admission
        self._params = sampling.model_copy(update={"temperature": 0.0})
        self._rewards: dict[int, float] = {}
        self._num_started, self._num_failed, self._first_reason = 0, 0, ""
        self._num_first = max(groups_per_step, MIN_FIRST)
        """Number of the first baselines. If all of them fail, the run ends."""
        self._num_first_failed = 0
        self._counts: Counter[Cause] = Counter()
        """Failed baselines since the last call of metrics()."""

    def admitted(self, wave: Sequence[Sample]) -> None:
        """Starts a baseline for each group of a wave, and discards the baselines of dropped groups."""
        self._rewards = {gid: reward for gid, reward in self._rewards.items() if self._admission.ticket(gid)}
        first = {sample.key.gid: sample for sample in reversed(wave)}
        for gid in dict.fromkeys(sample.key.gid for sample in wave):
            self._cluster.spawn(self._measure_baseline(first[gid]), name=f"baseline {gid}")

    def attach(self, stream: Stream) -> Stream:
        """Returns the stream of samples whose groups have a baseline."""
        return stream.plus(BASELINE)

    def take(self, gid: int) -> float:
        """Returns the baseline of a group. It is kept until the group is consumed, which may be drawn again."""
        return self._rewards[gid]

    def metrics(self) -> Metrics:
        """Returns the number of baselines that failed since the last call, by cause."""
        counts, self._counts = self._counts, Counter()
        return {f"failed_baselines/{cause}": float(count) for cause, count in sorted(counts.items())}

    def describe(self) -> str:
        """Returns a summary of the baselines in this process so far, as text for users. Empty if none failed."""
        if not self._num_failed:
            return ""
        return f", {self._num_failed} greedy baselines failed, the first of them by {brief(self._first_reason)}"

    async def _measure_baseline(self, sample: Sample) -> None:
        prompt, gid = sample.prompt, sample.key.gid
        request = Request(
            uid=f"greedy/{prompt.uid}",
            owner=SampleKey(gid, GREEDY_INDEX),
            attempt=prompt.attempt,
            prompt_ids=prompt.token_ids.tolist(),
            params=self._params,
        )
        number, self._num_started = self._num_started, self._num_started + 1
        measured = await self._score_response(request, prompt)
        if self._admission.ticket(gid) is None:
            return
        if isinstance(measured, SampleFailure):
            self._num_first_failed += number < self._num_first
            self._fail_group(gid, measured)
            return
        self._rewards[gid] = measured
        for key in self._admission.rows.find_keys(gid):
            self._admission.channel.put(key, {}, marks=(BASELINE,))

    async def _score_response(self, request: Request, prompt: Prompt) -> float | SampleFailure:
        """Returns the reward of the response to a request, or the reason why it has none."""
        [response] = await self._pool.answer([request], who="greedy baseline")
        if response.failure:
            return SampleFailure(reason=f"the engine refused the request: {response.failure}", cause=Cause.ENGINE)
        greedy = make_answered_sample(request.owner, prompt, response)
        [result] = await self._reward.with_cause("baseline").score([greedy])
        if result.failure is not None:
            return SampleFailure(reason=result.failure, cause=result.cause)
        return result.reward

    def _fail_group(self, gid: int, failure: SampleFailure) -> None:
        """Ends the samples of a group whose baseline failed.

        If the first baselines all fail, ends the run instead of replacing its groups forever.
        """
        self._num_failed += 1
        self._counts[failure.cause] += 1
        self._first_reason = self._first_reason or failure.reason
        for key in self._admission.rows.find_keys(gid):
            if key in self._admission.channel:
                self._on_failed(key, replace(failure, reason=f"{NO_BASELINE}{failure.reason}", is_final=True))
        self._admission.retire(gid, TerminalEvent.FAILED)
        if self._num_first_failed == self._num_first:
            self._cluster.fail(
                InterlaceError(
                    f"the greedy baselines of the first {self._num_first} groups all failed, so there is nothing to "
                    f"train on. The first failed by {brief(self._first_reason)}."
                )
            )
