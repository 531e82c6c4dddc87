"""A rollout engine that only costs time: continuous batching, advanced from event to event, never token by token."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from interlace.core.profile import RolloutCosts, speed_up
from interlace.core.runs import Runs
from interlace.core.training import WeightBundle
from interlace.core.types import Completion, FinishReason, Metrics, Progress, Request, Response
from interlace.runtime.sim.loop import virtual_loop
from interlace.runtime.worker import Worker, WorkerContext, operation
from interlace.simulate.pace import Job, Pace

Length = Callable[[Request], float]
"""Tokens until the response to a request ends by itself, those it came with included."""
ROLE = "rollout"
HEADROOM = 0.01
"""Of the KV cache: kept free when a sequence is admitted, or the next step would preempt it again."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Sequence:
    request: Request
    limit: int
    """Tokens at which it ends."""
    reason: FinishReason
    done: int
    """Tokens, those of the stint that goes on left out."""
    context: int
    """These and the prompt's."""
    versions: list[tuple[int, int]]
    began: int = 0
    """Decode step of the engine at which its stint began, or at which its weights changed."""
    number: int = 0
    """Of its stint; 0 where it does not run."""


class SimulatedEngine(Worker):
    """Serves requests at the cost that a profile gives: prefill, decode by batch and context, preemption at a full KV.

    A step of n sequences reads n more tokens than the one before, so k steps take a time quadratic in k.
    """

    def __init__(self, context: WorkerContext, costs: RolloutCosts, length: Length, pace: Pace) -> None:
        super().__init__(context)
        self._costs, self._length, self._pace, self._loop = costs, length, pace, virtual_loop()
        self._num_devices = max(1, len(context.devices))
        self._speed = speed_up(self._num_devices, costs.efficiency)
        self._capacity = costs.kv_tokens * self._num_devices
        self._reserve = int(HEADROOM * self._capacity)
        self._step_s = lru_cache(maxsize=costs.max_running)(costs.step_s)
        self._version = -1
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._ends: list[tuple[int, int, _Sequence]] = []
        """(step, number of the stint, its sequence): a heap; stints that ended before are passed over."""
        self._numbers = itertools.count(1)
        self._step = 0
        self._num_cached = 0
        """Tokens in the KV cache."""
        self._due_s = 0.0
        self._job: Job | None = None
        self._interrupted = False
        self._num_preemptions = 0
        self._kv_away: Literal["offload", "recompute"] | None = None

    async def serve(self, submissions: Sequence[Request], aborts: Sequence[str]) -> Progress:
        """Takes requests in and out, then decodes until a sequence finishes, interrupt() comes or nothing is left.

        A call that is younger than `min_call_s` goes on, whatever finishes.
        """
        loop = self._loop
        until_s = loop.now_s + self._costs.min_call_s
        responses = [
            _ended(found, FinishReason.ABORTED) for request_id in aborts if (found := self._take_out(request_id))
        ]
        self._waiting.extend(self._sequence(request) for request in submissions)
        self._due_s += self._costs.call_s + len(submissions) * self._costs.sequence_s
        if submissions:
            self._due_s += self._costs.intake_s
        num_new_tokens = num_running = num_preemptions = 0
        kv_use = 0.0
        while not self._interrupted:
            if self._waiting:
                self._admit({request.uid for request in submissions})
            if not self._running:
                break
            num_preemptions += self._preempt()
            num_running = len(self._running)
            left_s = until_s - loop.now_s if responses else math.inf
            num_new_tokens += num_running * await self._decode(num_running, left_s)
            kv_use = max(kv_use, self._num_cached / self._capacity)
            responses += self._finished()
            if responses and loop.now_s >= until_s:
                break
        self._interrupted = False
        return Progress(
            responses=tuple(responses),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_new_tokens=num_new_tokens,
            kv_use=kv_use,
            num_preemptions=num_preemptions,
        )

    @operation(on_device=False, concurrent=True)
    def interrupt(self) -> None:
        """Lets a serve() that runs return after its current step."""
        self._interrupted = True
        if self._job:
            self._job.stop()

    async def abort(self) -> tuple[Response, ...]:
        """Ends everything and returns what there is, to be resubmitted."""
        ids = [*self._running, *(sequence.request.id for sequence in self._waiting)]
        return tuple(_ended(found, FinishReason.ABORTED) for request_id in ids if (found := self._take_out(request_id)))

    async def update_weights(self, bundle: WeightBundle, mode: Literal["keep", "recompute"]) -> None:
        """Swaps all weights; with `recompute`, what is cached is computed again."""
        seconds = self._costs.update_s
        if mode == "recompute":
            seconds += self._num_cached * self._costs.prefill_token_s / self._speed
        await self._pace.work(ROLE, seconds)
        for sequence in self._running.values():
            self._book(sequence)
        self._version = bundle.version

    @operation(on_device=False)
    def stop_token_ids(self) -> tuple[int, ...]:
        """None: responses are as long as their length says."""
        return ()

    @operation(on_device=False)
    def engine_metrics(self) -> Metrics:
        """Counters since the last call."""
        count, self._num_preemptions = self._num_preemptions, 0
        return {"num_preemptions": float(count), "num_running": float(len(self._running))}

    async def onload(self) -> None:
        """The state, and the cache where offload() moved it; a dropped one is computed again with the next call."""
        await self._move(self._costs.onload_s, self._kv_away == "offload")
        if self._kv_away == "recompute":
            self._due_s += self._num_cached * self._costs.prefill_token_s / self._speed
        self._kv_away = None

    async def offload(self, kv: Literal["offload", "recompute"] = "offload") -> None:
        """kv: whether the cache of running sequences is moved along, or dropped."""
        await self._move(self._costs.offload_s, kv == "offload")
        self._kv_away = kv

    async def _move(self, state_s: float, with_kv: bool) -> None:
        kv_s = self._num_cached * self._costs.kv_token_s if with_kv else 0.0
        await self._pace.work(ROLE, (state_s + kv_s) / self._num_devices)

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return self._costs.memory_bytes(self._num_devices)

    def _sequence(self, request: Request) -> _Sequence:
        natural = self._length(request)
        limit = min(natural, request.params.max_new_tokens)
        return _Sequence(
            request=request,
            limit=int(limit),
            reason=FinishReason.STOP if limit == natural else FinishReason.LENGTH,
            done=len(request.generated_ids),
            context=len(request.prompt_ids) + len(request.generated_ids),
            versions=list(Runs.of(request.generated_versions).pieces),
        )

    def _admit(self, fresh: set[str]) -> None:
        """Starts what fits. fresh: prompts of which nothing is cached yet; each is computed once for its samples."""
        while self._waiting and len(self._running) < self._costs.max_running:
            sequence = self._waiting[0]
            if self._running and self._num_cached + sequence.context + self._reserve > self._capacity:
                return
            self._waiting.popleft()
            shared = not sequence.done and sequence.request.uid not in fresh
            fresh.discard(sequence.request.uid)
            self._due_s += 0.0 if shared else sequence.context * self._costs.prefill_token_s / self._speed
            self._begin(sequence)

    def _begin(self, sequence: _Sequence) -> None:
        sequence.began, sequence.number = self._step, next(self._numbers)
        self._running[sequence.request.id] = sequence
        self._num_cached += sequence.context
        heapq.heappush(self._ends, (self._step + max(1, sequence.limit - sequence.done), sequence.number, sequence))

    def _preempt(self) -> int:
        """Takes the youngest out until another step fits; the cache of what is left is enough then."""
        count, running = 0, self._running
        while self._num_cached + len(running) > self._capacity and len(running) > 1:
            sequence = self._stop(next(reversed(running.values())))
            self._waiting.appendleft(sequence)
            count += 1
        self._num_preemptions += count
        return count

    def _num_steps(self, num_running: int) -> int:
        """Until the next sequence ends, or the cache is full."""
        ends = self._ends
        while ends[0][1] != ends[0][2].number:
            heapq.heappop(ends)
        steps = ends[0][0] - self._step
        if num_running > 1:
            steps = min(steps, (self._capacity - self._num_cached) // num_running)
        return max(1, steps)

    async def _decode(self, num_running: int, left_s: float) -> int:
        """Waits until the next sequence ends, the cache is full, left_s have passed or somebody interrupts. Returns how
        many steps were done; one that was begun is finished.
        """
        steps, speed, prefill_s = self._num_steps(num_running), self._speed, self._due_s
        reading = self._costs.context_token_s * num_running / 2
        first = self._step_s(num_running) + self._costs.context_token_s * (self._num_cached - num_running / 2)
        self._due_s = 0.0
        if left_s < math.inf:
            steps = min(steps, max(1, _steps_in((left_s - prefill_s) * speed, first, reading)))
        self._job = self._pace.begin(ROLE, prefill_s + (steps * first + reading * steps**2) / speed)
        done_s = await self._pace.finish(self._job)
        self._job = None
        if self._interrupted:
            steps = min(steps, _steps_in((done_s - prefill_s) * speed, first, reading))
            await self._pace.work(ROLE, prefill_s + (steps * first + reading * steps**2) / speed - done_s)
        self._step += steps
        self._num_cached += steps * num_running
        return steps

    def _finished(self) -> list[Response]:
        found, ends = [], self._ends
        while ends and ends[0][0] <= self._step:
            _, number, sequence = heapq.heappop(ends)
            if number == sequence.number:
                found.append(_ended(self._stop(sequence), sequence.reason))
        return found

    def _take_out(self, request_id: str) -> _Sequence | None:
        if request_id in self._running:
            return self._stop(self._running[request_id])
        waiting = next((each for each in self._waiting if each.request.id == request_id), None)
        if waiting:
            self._waiting.remove(waiting)
        return waiting

    def _stop(self, sequence: _Sequence) -> _Sequence:
        """Ends a stint."""
        del self._running[sequence.request.id]
        sequence.number = 0
        self._book(sequence)
        self._num_cached -= sequence.context
        return sequence

    def _book(self, sequence: _Sequence) -> None:
        """What it got since its stint began, under the version that serves."""
        count = self._step - sequence.began
        if count:
            sequence.versions.append((self._version, count))
            sequence.done += count
            sequence.context += count
            sequence.began = self._step


def _ended(sequence: _Sequence, reason: FinishReason) -> Response:
    return response_of(sequence.request, sequence.versions, reason)


def _steps_in(seconds: float, first: float, reading: float) -> int:
    """Steps begun within so many seconds: k first + k^2 reading = seconds, rounded up."""
    if seconds <= 0:
        return 0
    steps = (math.sqrt(first**2 + 4 * reading * seconds) - first) / (2 * reading) if reading else seconds / first
    return math.ceil(steps - 1e-9)


def response_of(request: Request, versions: Sequence[tuple[int, int]], reason: FinishReason) -> Response:
    """A simulated response. versions: (version, tokens that it made) pairs, in order."""
    tagged = Runs(versions)
    zeros = Runs.repeated(0, len(tagged))
    completion = Completion(
        request=request,
        token_ids=zeros,
        logprobs=zeros,
        versions=tagged,
        finish_reason=reason,
    )
    return Response(completion=completion, text="")
