"""Scoring, inference and training on the virtual clock: their operations only take time."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import cast

import numpy as np

from interlace.core.random import keyed_random
from interlace.core.row import RowName
from interlace.core.runs import repeat_endlessly
from interlace.core.state_parts import OPTIMIZER, WEIGHTS
from interlace.core.types import FloatArray, Metrics, RewardResult, Sample
from interlace.forecast.costs.lengths import KEPT, to_normal, uniforms
from interlace.forecast.costs.pace import ControllerTime, Pace
from interlace.forecast.profile.types import InferenceCosts, RewardCosts, TrainCosts
from interlace.runtime.sim.loop import virtual_loop
from interlace.runtime.worker import Worker, WorkerContext, operation
from interlace.weights.ref import WeightPart

RIGHT, WRONG = RewardResult(reward=1.0), RewardResult(reward=0.0)


def zeros(samples: Sequence[Sample]) -> list[FloatArray]:
    """Returns zeros, [L] for each sample, that share their memory."""
    zero = repeat_endlessly(0.0, np.dtype(np.float32))
    return [zero[: sample.num_tokens] for sample in samples]


class SimulatedReward(Worker):
    """Pool of simulated scorers: each answer takes a log-normal time. Right answers get 1, the others 0."""

    def __init__(
        self,
        context: WorkerContext,
        costs: RewardCosts,
        seed: int,
        controller: ControllerTime,
        controller_sample_s: float = 0.0,
    ) -> None:
        """controller_sample_s: controller seconds per sample; they are added here because every sample is scored."""
        super().__init__(context)
        self._costs, self._controller, self._controller_sample_s = costs, controller, controller_sample_s
        self._loop = virtual_loop()
        self._free_s = [0.0] * costs.workers
        self._verdict = _cache_verdicts(costs, seed)

    @operation(bin="score", on_device=False)
    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Returns one result per sample after the last one is scored."""
        now = end_s = self._loop.now_s
        self._controller.spend(self._costs.call_s)
        results = []
        for sample in samples:
            prompt = sample.prompt
            latency_s, result = self._verdict(prompt.uid, prompt.attempt, sample.key.index)
            begin_s = max(self._controller.spend(self._controller_sample_s), self._free_s[0])
            heapq.heapreplace(self._free_s, begin_s + latency_s)
            end_s = max(end_s, begin_s + latency_s)
            results.append(result)
        await self._loop.alarm(end_s - now)
        return results


@lru_cache(maxsize=4)
def _cache_verdicts(costs: RewardCosts, seed: int) -> Callable[[str, int, int], tuple[float, RewardResult]]:
    """Returns a cached function from a sample's key to the seconds that a scorer needs, and the result.

    It is the same function for the same arguments.
    """
    solve_rate = lru_cache(maxsize=4096)(partial(_draw_solve_rate, costs, seed))

    @lru_cache(maxsize=KEPT)
    def verdict(uid: str, attempt: int, index: int) -> tuple[float, RewardResult]:
        key = (seed, uid, attempt, index)
        luck, haste = uniforms("score", *key)
        latency_s = costs.median_s * math.exp(costs.sigma * to_normal(haste))
        chance = uniforms("failure", *key)[0] if costs.fail_share else 1.0
        if chance < costs.fail_share:
            return min(latency_s, costs.max_s), RewardResult(failure="a simulated failure")
        return min(latency_s, costs.max_s), RIGHT if luck < solve_rate(uid) else WRONG

    return verdict


def _draw_solve_rate(costs: RewardCosts, seed: int, uid: str) -> float:
    """Draws a prompt's beta-distributed solve rate. `solve_spread`: its variance as a share of the largest one."""
    mean, spread = costs.solve_rate, costs.solve_spread
    if spread <= 0 or mean in (0.0, 1.0):
        return mean
    if spread >= 1:
        return float(uniforms("solve", seed, uid)[0] < mean)
    weight = 1 / spread - 1
    return keyed_random("solve", seed, uid).betavariate(mean * weight, (1 - mean) * weight)


class SimulatedRewardModel(SimulatedReward):
    """Simulated reward model, which scores on devices."""

    @operation(bin="score")
    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        return await super().score(samples)


class SimulatedInference(Worker):
    """Simulated log-probs of a model that is not trained."""

    def __init__(self, context: WorkerContext, costs: InferenceCosts, pace: Pace, *, num_top: int = 0) -> None:
        """num_top: most probable tokens at each place that the algorithm needs."""
        super().__init__(context)
        self._costs, self._pace, self._num_top = costs, pace, num_top
        self._role = context.group.partition("/")[0]
        self._num_devices = max(1, len(context.devices))
        self._speed = costs.speed(self._num_devices)

    @operation(bin="inference", phase="reference")
    async def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns zeros, [L] per sample."""
        await self._compute_samples(samples, self._costs.token_s)
        return zeros(samples)

    @operation(bin="inference", phase="reference", parts=(WEIGHTS,))
    async def top_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns zeros, [L, 1 + 2 K] per sample."""
        await self._compute_samples(samples, self._costs.token_s)
        return [np.zeros((sample.num_tokens, 1 + 2 * self._num_top), np.float32) for sample in samples]

    async def onload(self) -> None:
        await self._work(self._costs.onload_s / self._num_devices)

    async def offload(self) -> None:
        await self._work(self._costs.offload_s / self._num_devices)

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return self._costs.memory_bytes(self._num_devices)

    async def _compute_samples(self, samples: Sequence[Sample], token_s: float) -> None:
        num_tokens = sum(sample.num_total_tokens for sample in samples)
        call_s = self._costs.call_s
        seconds = call_s + num_tokens * token_s / self._speed
        await self._work(seconds, call_s / seconds if seconds else 0.0)

    async def _work(self, seconds: float, call_share: float = 0.0) -> None:
        await self._pace.controller.wait()
        await self._pace.work(self._role, seconds, call_share)


class SimulatedTrainer(SimulatedInference):
    """Simulated trained model: actor, critic or process reward model."""

    def __init__(
        self,
        context: WorkerContext,
        costs: TrainCosts,
        pace: Pace,
        controller_step_s: float = 0.0,
        *,
        sends_adapters: bool = False,
    ) -> None:
        """controller_step_s: controller seconds per step, added at the end of training."""
        super().__init__(context, costs, pace)
        self._train_costs, self._controller_step_s = costs, controller_step_s
        self._sends_adapters = sends_adapters
        self._prepared: deque[Sequence[Sample]] = deque()

    @operation(bin="inference", parts=(WEIGHTS,))
    async def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        await self._compute_samples(samples, self._train_costs.inference_token_s)
        return zeros(samples)

    @operation(bin="inference", phase="values", parts=(WEIGHTS,))
    async def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        return await self.logprobs(samples)

    @operation(bin="inference", phase="values", parts=(WEIGHTS,))
    async def process_rewards(self, samples: Sequence[Sample]) -> list[FloatArray]:
        return await self.logprobs(samples)

    @operation(bin="train", parts=(WEIGHTS,))
    async def accumulate(self, samples: Sequence[Sample] | Sequence[RowName], prepared: bool = False) -> None:
        taken = self._prepared.popleft() if prepared else cast("Sequence[Sample]", samples)
        await self._compute_samples(taken, self._costs.token_s)

    @operation(on_device=False)
    async def prepare(self, samples: Sequence[Sample]) -> None:
        """Stores samples without taking time."""
        self._prepared.append(samples)

    @operation(bin="train", makes_activations=False)
    async def optimizer_step(self) -> None:
        await self._work(self._train_costs.optimizer_s / self._speed, call_share=1.0)

    @operation(on_device=False)
    async def step_metrics(self) -> Metrics:
        """Returns no metrics. Takes the controller's time of the step."""
        if self._controller_step_s:
            self._pace.controller.spend(self._controller_step_s)
            await self._pace.controller.wait()
        return {}

    @operation(bin="weight_sync", collect="all", parts=(WEIGHTS,), makes_activations=False)
    async def export_weights(self, version: int, *, copy: bool) -> WeightPart:
        """Takes the time of an export. Returns a part without content."""
        del copy
        await self._work(self._train_costs.export_s)
        return WeightPart.simulated(version, is_adapter=self._sends_adapters)

    async def onload(self, parts: Sequence[str] | None = None) -> None:
        await self._work(self._costs.onload_s * self._share(parts) / self._num_devices)

    async def offload(self, parts: Sequence[str] | None = None) -> None:
        await self._work(self._costs.offload_s * self._share(parts) / self._num_devices)

    def _share(self, parts: Sequence[str] | None) -> float:
        """Returns the share of the state in these parts."""
        if parts is None:
            return 1.0
        moments = self._costs.moment_bytes / self._costs.state_bytes
        return sum(moments if part == OPTIMIZER else 1 - moments for part in parts)

    @operation(on_device=False)
    def memory_parts(self) -> Mapping[str, int]:
        if not self._costs.moment_bytes:
            return super().memory_parts()
        moments = self._costs.moment_bytes // self._num_devices
        return {OPTIMIZER: moments, WEIGHTS: self.memory_bytes() - moments}
