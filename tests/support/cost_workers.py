"""Workers that only cost time, for tests of the runtime and the schedule on the virtual clock."""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from interlace.algorithms.base import Advantages, Algorithm, AlgorithmConfig, Needs, rewards_of
from interlace.core.random import keyed_random
from interlace.core.training import LossInputs, LossOutputs, WeightBundle
from interlace.core.types import (
    Completion,
    FinishReason,
    Metrics,
    Progress,
    Prompt,
    Request,
    Response,
    RewardResult,
    Sample,
    SampleGroup,
    SamplingParams,
)
from interlace.runtime.worker import Worker, WorkerContext, operation


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, but for the lengths."""

    decode: float = 0.01
    score: float = 0.05
    reference_token: float = 1e-4
    train_token: float = 5e-4
    optimizer: float = 0.2
    sync: float = 0.1
    median_tokens: int = 40
    max_tokens: int = 200
    fail_share: float = 0.0
    filter_share: float = 0.0
    prefill_token: float = 1e-4
    kv_tokens: int = 10**9
    """Of an engine's cache; a sequence is never preempted for it, but it is told how full it is."""
    memory: int = 10


@dataclass
class _Sequence:
    request: Request
    ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


def length_of(request: Request, costs: Costs) -> int:
    """Keyed by the request alone, as a real engine's samples are while the weights stay."""
    draw = keyed_random("length", request.uid, request.attempt, request.sample_index).lognormvariate(0, 0.8)
    return max(1, min(request.params.max_new_tokens, round(costs.median_tokens * draw)))


class CostRollout(Worker):
    """Decodes all running sequences in step; advances from event to event."""

    def __init__(self, context: WorkerContext, costs: Costs) -> None:
        super().__init__(context)
        self._costs, self._version = costs, -1
        self._running: dict[str, _Sequence] = {}
        self._interrupt = asyncio.Event()
        self.num_recomputed = 0
        """Tokens whose cache was dropped when the device changed hands."""

    async def serve(self, submissions: Sequence[Request], aborts: Sequence[str]) -> Progress:
        states = [self._running.pop(request_id) for request_id in aborts if request_id in self._running]
        aborted = tuple(_response(state, FinishReason.ABORTED) for state in states)
        for request in submissions:
            assert request.id not in self._running
            state = _Sequence(request, list(request.generated_ids), list(request.generated_versions))
            self._running[request.id] = state
        if not self._running:
            return Progress(responses=aborted)
        left = {key: length_of(s.request, self._costs) - len(s.ids) for key, s in self._running.items()}
        steps = await self._sleep(min(left.values()) * self._costs.decode)
        num_new_tokens = steps * len(self._running)
        held = sum(len(state.request.prompt_ids) + len(state.ids) for state in self._running.values())
        responses = (*aborted, *self._finished())
        return Progress(
            responses=responses,
            num_running=len(self._running),
            num_new_tokens=num_new_tokens,
            kv_use=min(1.0, held / self._costs.kv_tokens),
        )

    async def _sleep(self, seconds: float) -> int:
        loop = asyncio.get_running_loop()
        start = loop.time()
        # Not wait_for(), which in Python 3.11 may swallow a cancellation that comes with the interrupt.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._interrupt.wait()
        self._interrupt.clear()
        steps = round((loop.time() - start) / self._costs.decode)
        for state in self._running.values():
            state.ids += [7] * steps
            state.versions += [self._version] * steps
        return steps

    def _finished(self) -> list[Response]:
        done = [k for k, s in self._running.items() if len(s.ids) >= length_of(s.request, self._costs)]
        return [self._end(self._running.pop(key)) for key in done]

    def _end(self, state: _Sequence) -> Response:
        natural = length_of(replace(state.request, params=SamplingParams(max_new_tokens=10**6)), self._costs)
        return _response(state, FinishReason.STOP if len(state.ids) >= natural else FinishReason.LENGTH)

    async def offload(self, kv: str = "offload") -> None:  # type: ignore[override]
        assert kv in ("offload", "recompute")
        if kv == "recompute":
            dropped = sum(len(state.request.prompt_ids) + len(state.ids) for state in self._running.values())
            self.num_recomputed += dropped
            await asyncio.sleep(dropped * self._costs.prefill_token)

    @operation(on_device=False)
    def engine_metrics(self) -> Metrics:
        return {"num_running": float(len(self._running))}

    @operation(on_device=False, concurrent=True)
    def interrupt(self) -> None:
        self._interrupt.set()

    def abort(self) -> tuple[Response, ...]:
        states, self._running = self._running, {}
        return tuple(_response(state, FinishReason.ABORTED) for state in states.values())

    async def update_weights(self, bundle: WeightBundle, mode: str) -> None:
        assert mode in ("keep", "recompute")
        assert bundle.version > self._version or self._version == -1
        await asyncio.sleep(self._costs.sync)
        self._version = bundle.version

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return self._costs.memory


def _response(state: _Sequence, reason: FinishReason) -> Response:
    completion = Completion(
        request=state.request,
        token_ids=tuple(state.ids),
        logprobs=tuple(-0.5 for _ in state.ids),
        versions=tuple(state.versions),
        finish_reason=reason,
    )
    return Response(completion=completion, text="")


class CostReward(Worker):
    def __init__(self, context: WorkerContext, costs: Costs) -> None:
        super().__init__(context)
        self._costs = costs

    @operation(on_device=False)
    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        return await asyncio.gather(*(self._one(sample) for sample in samples))

    async def _one(self, sample: Sample) -> RewardResult:
        rng = keyed_random("reward", sample.prompt.uid, sample.prompt.attempt, sample.key.index)
        await asyncio.sleep(rng.random() * self._costs.score)
        if rng.random() < self._costs.fail_share:
            return RewardResult(failure="made to fail")
        return RewardResult(reward=rng.random())


class CostReference(Worker):
    def __init__(self, context: WorkerContext, costs: Costs) -> None:
        super().__init__(context)
        self._costs = costs

    async def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        await asyncio.sleep(sum(sample.num_total_tokens for sample in samples) * self._costs.reference_token)
        return [np.zeros(sample.num_tokens, np.float32) for sample in samples]

    async def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return await self.logprobs(samples)

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return self._costs.memory


class CostActor(CostReference):
    """Remembers what it trained on."""

    def __init__(self, context: WorkerContext, costs: Costs) -> None:
        super().__init__(context, costs)
        self.minibatches: list[list[Sample]] = []
        self._open: list[Sample] = []

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        await asyncio.sleep(sum(sample.num_total_tokens for sample in samples) * self._costs.train_token)
        self._open += samples

    async def optimizer_step(self) -> None:
        await asyncio.sleep(self._costs.optimizer)
        self.minibatches.append(self._open)
        self._open = []

    @operation(on_device=False)
    def step_metrics(self) -> Metrics:
        return {"actor/loss": 0.0}

    async def export_weights(self, version: int, *, copy: bool) -> WeightBundle:
        await asyncio.sleep(self._costs.sync)
        return WeightBundle(version=version, tensors={})


class CostAlgorithm(Algorithm):
    """Keeps a keyed share of the groups."""

    def __init__(self, costs: Costs, needs: Needs, refill_rounds: int) -> None:
        super().__init__(AlgorithmConfig(refill_rounds=refill_rounds))
        self._costs, self._needs = costs, needs

    @property
    def needs(self) -> Needs:
        return self._needs

    @property
    def is_group_relative(self) -> bool:
        return True

    def keeps(self, group: SampleGroup) -> bool:
        prompt = group.samples[0].prompt
        return keyed_random("keep", prompt.uid, prompt.attempt).random() >= self._costs.filter_share

    def advantages(self, group: SampleGroup) -> Advantages:
        rewards = rewards_of(group)
        return Advantages(
            advantages=[
                np.full(s.num_tokens, r - rewards.mean(), np.float32)
                for s, r in zip(group.samples, rewards, strict=True)
            ]
        )

    def loss(self, inputs: LossInputs) -> LossOutputs:
        raise AssertionError("cost workers compute no loss")


class CountedPrompts:
    """`total` prompts, or without end."""

    def __init__(self, total: int | None = None) -> None:
        self._next, self._total = 0, total

        self._again: list[Prompt] = []

    @property
    def exhausted(self) -> bool:
        return not self._again and self._total is not None and self._next >= self._total

    def hand_back(self, prompts: Iterable[Prompt]) -> None:
        self._again += prompts

    def __next__(self) -> Prompt:
        if self._again:
            return self._again.pop(0)
        self._next += 1
        return Prompt(uid=f"p{self._next - 1}", token_ids=np.arange(5, dtype=np.int32), text="", answer="")
