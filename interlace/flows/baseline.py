"""Greedy baselines: the reward of one greedy response per group."""

from collections.abc import Sequence

from interlace.core.causes import SampleFailure
from interlace.core.types import GREEDY_INDEX, NO_BASELINE, Request, Sample, SampleKey, SamplingParams, TerminalEvent
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.role_groups import RewardGroup
from interlace.rollouts.stream import BASELINE, OnFailed, Stream
from interlace.rollouts.turns import make_answered_sample
from interlace.runtime.cluster import Cluster
from interlace.stages.admission import Admission


class GreedyBaseline:
    """Generates and scores one greedy response for each admitted group.

    Consumes: waves of admitted samples (`admitted`).
    Produces: the mark BASELINE on each sample of a group, and the baseline's reward (`take`). If the baseline fails,
        the samples of its group end as `failed`.
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
        on_failed: OnFailed,
    ) -> None:
        """on_failed: called with each sample that ends because its group's baseline was not scored."""
        self._on_failed = on_failed
        self._cluster, self._pool, self._reward, self._admission = cluster, pool, reward, admission
        self._params = sampling.model_copy(update={"temperature": 0.0})
        self._rewards: dict[int, float] = {}

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

    async def _measure_baseline(self, sample: Sample) -> None:
        prompt, gid = sample.prompt, sample.key.gid
        request = Request(
            uid=f"greedy/{prompt.uid}",
            owner=SampleKey(gid, GREEDY_INDEX),
            attempt=prompt.attempt,
            prompt_ids=prompt.token_ids.tolist(),
            params=self._params,
        )
        [response] = await self._pool.complete([request], who="greedy baseline")
        greedy = make_answered_sample(SampleKey(gid, GREEDY_INDEX), prompt, response)
        results = await self._reward.with_cause("baseline").score([greedy])
        if self._admission.ticket(gid) is None:
            return
        keys = self._admission.rows.find_keys(gid)
        if results[0].failure is not None:
            for key in keys:
                if key in self._admission.channel:
                    reason = f"{NO_BASELINE}{results[0].failure}"
                    self._on_failed(key, SampleFailure(reason=reason, cause=results[0].cause, is_final=True))
            self._admission.retire(gid, TerminalEvent.FAILED)
            return
        self._rewards[gid] = results[0].reward
        for key in keys:
            self._admission.channel.put(key, {}, marks=(BASELINE,))
