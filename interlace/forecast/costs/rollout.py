"""Simulated rollout engine: continuous batching that advances from event to event, not token by token."""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from interlace.core.progress import Progress
from interlace.core.runs import Runs
from interlace.core.types import Completion, FinishReason, Metrics, Request, Response, SampleKey
from interlace.forecast.costs.kept import KeptContexts
from interlace.forecast.costs.pace import Pace, PacedWork
from interlace.forecast.costs.stretch import Stretch
from interlace.forecast.profile.types import RolloutCosts
from interlace.runtime.sim.loop import virtual_loop
from interlace.runtime.worker import Worker, WorkerContext, operation
from interlace.weights.ref import UpdateMode, WeightRef

Length = Callable[[Request], float]
"""Returns the tokens at which the response to a request ends naturally, including tokens it was submitted with."""
ROLE = "rollout"
HEADROOM = 0.01
"""Share of the KV cache kept free at an admission; without it the next step would preempt the admitted sequence."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Sequence:
    request: Request
    limit: int
    """Number of generated tokens at which the sequence ends."""
    reason: FinishReason
    done: int
    """Generated tokens before the current stint: the time since the last admission of the sequence."""
    context: int
    """Tokens of the context: the prompt and `done`."""
    versions: list[tuple[int, int]]
    num_found: int = 0
    """Context tokens that were in the cache at the start."""
    began: int = 0
    """Decode step of the engine at which the current stint began, or its weights changed."""
    number: int = 0
    """Number of the current stint; 0 if the sequence does not run."""
    own: int | None = None
    """Older weight version under which the sequence ends (mode `own`). If None, the engine's version."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Tally:
    """Counts of one call."""

    num_new_tokens: int = 0
    num_preemptions: int = 0
    max_cached: int = 0


class SimulatedEngine(Worker):
    """Serves requests at the cost that a profile gives: prefill, decode by batch and context, preemption at a full KV.

    A step of n sequences reads n more tokens than the one before, so k steps take a time quadratic in k.
    """

    def __init__(self, context: WorkerContext, costs: RolloutCosts, length: Length, pace: Pace) -> None:
        super().__init__(context)
        self._costs, self._length, self._pace, self._loop = costs, length, pace, virtual_loop()
        self._num_devices = max(1, len(context.devices))
        self._speed = costs.speed(self._num_devices)
        self._context_token_s = costs.context_token_s / costs.context_speed(self._num_devices)
        self._capacity = costs.kv_tokens * self._num_devices
        self._reserve = int(HEADROOM * self._capacity)
        self._step_s = lru_cache(maxsize=costs.max_running)(costs.step_s)
        self._version = -1
        self._older: Counter[int] = Counter()
        """Older version -> running sequences that end under it. The rows of each version are decoded separately."""
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._ends: list[tuple[int, int, _Sequence]] = []
        """Heap of (step, number of the stint, sequence). Entries of earlier stints are skipped."""
        self._prompts: dict[str, int] = {}
        """Prompt of running sequences -> number of these sequences."""
        self._num_stints = 0
        self._step = 0
        self._num_cached = 0
        self._kept = KeptContexts()
        """Tokens in the KV cache."""
        self._due_s = 0.0
        self._job: PacedWork | None = None
        self._interrupted = False
        self._num_preemptions = 0
        self._kv_away: Literal["offload", "recompute"] | None = None

    @operation(bin="generate")
    async def serve(
        self, requests: Sequence[Request], aborts: Sequence[str], ended: Sequence[SampleKey] = ()
    ) -> Progress:
        """Takes requests in and out, then decodes until a sequence finishes, interrupt() is called or none is left.

        A call continues until `min_call_s` have passed, also if a sequence finishes.
        """
        loop = self._loop
        until_s = loop.now_s + self._costs.min_call_s
        responses = [
            _make_response(found, FinishReason.ABORTED)
            for request_id in aborts
            if (found := self._take_out(request_id))
        ]
        if ended:
            self._kept.release(ended)
        self._due_s += self._costs.call_s + len(requests) * self._costs.sequence_s
        if requests:
            self._waiting.extend([self._sequence(request) for request in requests])
            self._due_s += self._costs.intake_s
        tally = _Tally()
        while not self._interrupted:
            if self._waiting:
                self._admit()
            if not self._running:
                break
            if self._is_too_full:
                self._preempt(tally)
            if self._kept.num_tokens:
                self._kept.fit(self._capacity - self._num_cached, loop.now_s)
            await self._decode(tally, until_s - loop.now_s if responses else math.inf)
            responses += self._finish_sequences()
            if responses and loop.now_s >= until_s:
                break
        self._interrupted = False
        return Progress(
            responses=tuple(responses),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_new_tokens=tally.num_new_tokens,
            kv_use=tally.max_cached / self._capacity,
            num_preemptions=tally.num_preemptions,
        )

    @operation(on_device=False, concurrent=True)
    def interrupt(self) -> None:
        """Makes a running serve() return after its current step."""
        self._interrupted = True
        if self._job:
            self._job.stop()

    @operation(bin="switch", phase="rollout")
    async def abort(self) -> tuple[Response, ...]:
        """Ends all sequences and returns their tokens so far, for resubmission."""
        ids = [*self._running, *(sequence.request.id for sequence in self._waiting)]
        return tuple(
            _make_response(found, FinishReason.ABORTED) for request_id in ids if (found := self._take_out(request_id))
        )

    @operation(bin="weight_sync")
    async def update_weights(self, ref: WeightRef, mode: UpdateMode) -> None:
        """Replaces all weights. `recompute` recomputes the cache; `own` lets running sequences keep their version."""
        seconds = self._costs.update_s
        if mode == "recompute":
            seconds += self._num_cached * self._costs.prefill_token_s / self._speed
            self._kept.clear()
        await self._pace.work(ROLE, seconds)
        for sequence in self._running.values():
            self._book(sequence)
        if mode == "own":
            self._pin()
        self._version = ref.version

    @operation(on_device=False)
    def stop_token_ids(self) -> tuple[int, ...]:
        """Returns no ids: the drawn length ends a response."""
        return ()

    @operation(on_device=False)
    def engine_metrics(self) -> Metrics:
        """Returns the counters since the last call."""
        count, self._num_preemptions = self._num_preemptions, 0
        return {
            "num_preemptions": float(count),
            "num_running": float(len(self._running)),
            "older_versions": float(len(self._older)),
        }

    @operation(on_device=False)
    def recover(self) -> str:
        """Forgets the weights, as a new process has none. Returns no reason: it always succeeds."""
        self._version = -1
        return ""

    async def onload(self) -> None:
        """Loads the state, and the cache if offload() moved it. The next call recomputes a dropped cache."""
        await self._move(self._costs.onload_s, self._kv_away == "offload")
        if self._kv_away == "recompute":
            self._due_s += self._num_cached * self._costs.prefill_token_s / self._speed
        self._kv_away = None

    async def offload(self, kv: Literal["offload", "recompute"] = "offload") -> None:
        """Unloads the state. kv: whether the cache of running sequences is moved or dropped."""
        if kv == "recompute":
            self._kept.clear()
        await self._move(self._costs.offload_s, kv == "offload")
        self._kv_away = kv

    async def _move(self, state_s: float, with_kv: bool) -> None:
        kv_s = (self._num_cached + self._kept.num_tokens) * self._costs.kv_token_s if with_kv else 0.0
        await self._pace.work(ROLE, (state_s + kv_s) / self._num_devices)

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return self._costs.memory_bytes(self._num_devices)

    def _pin(self) -> None:
        """Keeps the weight version of all sequences that began under the newest version."""
        for sequence in [*self._running.values(), *self._waiting]:
            if sequence.own is None and (sequence.number or sequence.done):
                sequence.own = self._version
                self._older[self._version] += bool(sequence.number)

    def _sequence(self, request: Request) -> _Sequence:
        natural = self._length(request)
        limit = min(natural, request.params.max_new_tokens)
        versions = list(Runs.of(request.generated_versions).pieces) if request.generated_versions else []
        return _Sequence(
            request=request,
            limit=int(limit),
            reason=FinishReason.STOP if limit == natural else FinishReason.LENGTH,
            done=len(request.generated_ids),
            context=len(request.prompt_ids) + len(request.generated_ids),
            versions=versions,
            own=versions[-1][0] if versions and versions[-1][0] in self._older else None,
        )

    def _admit(self) -> None:
        """Starts the sequences that fit. A prompt is computed unless another sample of it runs."""
        waiting, running = self._waiting, self._running
        while waiting and len(running) < self._costs.max_running:
            sequence = waiting[0]
            if running and self._num_cached + sequence.context + self._reserve > self._capacity:
                return
            waiting.popleft()
            found = 0
            if self._kept.num_tokens:
                found = self._kept.take(sequence.request, sequence.context, self._loop.now_s)
            if not found and not sequence.done and not sequence.request.turn:
                found = sequence.context if sequence.request.uid in self._prompts else 0
            self._due_s += (sequence.context - found) * self._costs.prefill_token_s / self._speed
            sequence.num_found = max(sequence.num_found, found)
            self._begin(sequence)

    def _begin(self, sequence: _Sequence) -> None:
        self._num_stints += 1
        sequence.began, sequence.number = self._step, self._num_stints
        self._running[sequence.request.id] = sequence
        if sequence.own is not None:
            self._older[sequence.own] += 1
        uid = sequence.request.uid
        self._prompts[uid] = self._prompts.get(uid, 0) + 1
        self._num_cached += sequence.context
        heapq.heappush(self._ends, (self._step + max(1, sequence.limit - sequence.done), sequence.number, sequence))

    @property
    def _is_too_full(self) -> bool:
        """Returns whether the cache has no room for another step."""
        num_running = len(self._running)
        return self._num_cached + num_running > self._capacity and num_running > 1

    def _preempt(self, tally: "_Tally") -> None:
        """Removes the youngest sequences until the cache has room for another step."""
        while self._is_too_full:
            sequence = self._stop(next(reversed(self._running.values())))
            self._waiting.appendleft(sequence)
            tally.num_preemptions += 1
            self._num_preemptions += 1

    def _ahead(self) -> list[Stretch]:
        """Returns the stretches until a sequence ends. If the cache fills up earlier, the youngest are preempted."""
        num_running, num_cached, step, ends = len(self._running), self._num_cached, self._step, self._ends
        while ends[0][1] != ends[0][2].number:
            heapq.heappop(ends)
        end, _, first_to_end = ends[0]
        found = [self._stretch(end - step, num_running, num_cached, self._due_s)]
        step += found[0].steps
        youngest = reversed(self._running.values())
        # No admission is possible here: the reserve covers at least one more step.
        while step < end and num_running <= self._reserve:
            num_cached += found[-1].steps * num_running
            while num_cached + num_running > self._capacity and num_running > 1:
                sequence = next(youngest)
                if sequence is first_to_end:
                    return found
                num_cached -= sequence.context + step - sequence.began
                num_running -= 1
            found.append(self._stretch(end - step, num_running, num_cached, 0.0))
            step += found[-1].steps
        return found

    def _stretch(self, most: int, num_running: int, num_cached: int, prefill_s: float) -> Stretch:
        """Returns a stretch of at most `most` steps: as many as fit into the cache, but at least one."""
        room = (self._capacity - num_cached) // num_running
        steps = max(1, room if room < most and num_running > 1 else most)
        reading = self._context_token_s * num_running / 2
        first = self._rows_s(num_running) / self._speed + self._context_token_s * (num_cached - num_running / 2)
        return Stretch(steps, num_running, prefill_s, first, reading)

    def _rows_s(self, num_running: int) -> float:
        """Returns the seconds of a step without context; the rows of each version are decoded one after another."""
        if not self._older:
            return self._step_s(num_running)
        newest = num_running - self._older.total()
        rows = [*self._older.values(), newest] if newest > 0 else self._older.values()
        return sum(map(self._step_s, rows))

    async def _decode(self, tally: "_Tally", left_s: float) -> None:
        """Waits until the next sequence ends, `left_s` have passed or a caller interrupts. Finishes a started step."""
        stretches = self._ahead()
        self._due_s = 0.0
        if left_s < math.inf:
            stretches = [stretches[0].cut(max(1, stretches[0].steps_in(left_s)))]
        self._job = self._pace.begin(ROLE, sum([each.seconds for each in stretches]))
        done_s = await self._pace.finish(self._job)
        self._job = None
        for place, each in enumerate(stretches):
            if place:
                self._preempt(tally)
            stretch = each.cut(each.steps_in(done_s)) if self._interrupted else each
            num_tokens, seconds = stretch.steps * stretch.num_running, stretch.seconds
            self._step += stretch.steps
            self._num_cached += num_tokens
            tally.num_new_tokens += num_tokens
            tally.max_cached = max(tally.max_cached, self._num_cached)
            if self._interrupted and done_s < seconds:
                await self._pace.work(ROLE, seconds - done_s)
                return
            done_s -= seconds

    def _finish_sequences(self) -> list[Response]:
        found, ends = [], self._ends
        while ends and ends[0][0] <= self._step:
            _, number, sequence = heapq.heappop(ends)
            if number == sequence.number:
                done = self._stop(sequence)
                if done.request.may_continue:
                    self._kept.keep(done.request, done.context - 1, self._loop.now_s)
                found.append(_make_response(done, sequence.reason))
        return found

    def _take_out(self, request_id: str) -> _Sequence | None:
        if request_id in self._running:
            return self._stop(self._running[request_id])
        waiting = next((each for each in self._waiting if each.request.id == request_id), None)
        if waiting:
            self._waiting.remove(waiting)
        return waiting

    def _stop(self, sequence: _Sequence) -> _Sequence:
        """Ends the stint of a sequence."""
        del self._running[sequence.request.id]
        if sequence.own is not None:
            self._older[sequence.own] -= 1
            self._older += Counter()  # remove versions without running sequences
        uid, sequence.number = sequence.request.uid, 0
        left = self._prompts[uid] - 1
        if left:
            self._prompts[uid] = left
        else:
            del self._prompts[uid]
        self._book(sequence)
        self._num_cached -= sequence.context
        return sequence

    def _book(self, sequence: _Sequence) -> None:
        """Adds the tokens since a sequence's stint began to its total, under the version that serves it."""
        count = self._step - sequence.began
        if count:
            sequence.versions.append((self._version if sequence.own is None else sequence.own, count))
            sequence.done += count
            sequence.context += count
            sequence.began = self._step


def _make_response(sequence: _Sequence, reason: FinishReason) -> Response:
    versions = sequence.versions
    tagged = Runs.repeated(*versions[0]) if len(versions) == 1 else Runs(versions)
    zeros = Runs.repeated(0, len(tagged))
    completion = Completion(
        request=sequence.request,
        token_ids=zeros,
        logprobs=zeros,
        versions=tagged,
        finish_reason=reason,
        num_cached_tokens=min(sequence.num_found, len(sequence.request.prompt_ids)),
    )
    return Response(completion=completion, text="")
