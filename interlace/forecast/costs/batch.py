"""The sequences of a simulated engine: continuous batching that advances from event to event, not token by token."""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from interlace.core.kv_eviction import ReturnTimes, first_to_go
from interlace.core.runs import Runs
from interlace.core.types import FinishReason, Request, Response, SampleKey
from interlace.forecast.profile.types import RolloutCosts

Length = Callable[[Request], float]
"""Returns the tokens at which the response to a request ends naturally, including tokens it was submitted with."""
HEADROOM = 0.01
"""Share of the KV cache kept free at an admission; without it the next step would preempt the admitted sequence."""


class KeptContexts:
    """Contexts of ended turns, which give way to running sequences. See RolloutCosts.eviction."""

    def __init__(self, eviction: Literal["fewest_tokens", "least_recent"] = "fewest_tokens") -> None:
        self._is_lru = eviction == "least_recent"
        self._kept: dict[SampleKey, tuple[float, int]] = {}
        """Sample -> (time of the start, in seconds; number of tokens), the least recently used first."""
        self._returns = ReturnTimes()
        self.num_tokens = 0
        """Tokens of all kept contexts."""

    def keep(self, request: Request, num_tokens: int, now_s: float) -> None:
        """Keeps the context of a turn that ended, if its sample may have another turn."""
        if request.may_continue and num_tokens > 0:
            self._drop(request.owner)
            self._kept[request.owner] = now_s, num_tokens
            self.num_tokens += num_tokens

    def take(self, request: Request, context: int, now_s: float) -> int:
        """Releases the context that was kept for the sample of a turn. Returns the tokens that are reused."""
        since_s, num_tokens = self._kept.get(request.owner, (0.0, 0))
        if num_tokens:
            self._returns.observe(now_s - since_s)
            self._drop(request.owner)
        return max(0, min(num_tokens, context - 1))

    def release(self, owners: Sequence[SampleKey]) -> None:
        """Drops the contexts of these samples. An engine that evicts the least recently used tokens keeps them."""
        if not self._is_lru:
            for owner in owners:
                self._drop(owner)

    def fit(self, room: int, now_s: float) -> None:
        """Drops contexts in the order of eviction until the rest fits into `room` tokens."""
        while (excess := self.num_tokens - max(0, room)) > 0:
            if self._is_lru:
                self._evict_least_recent(excess)
                continue
            owners = [*self._kept]
            waits = [(now_s - since_s, num_tokens) for since_s, num_tokens in self._kept.values()]
            self._drop(owners[first_to_go(waits, patience_s=self._returns.patience_s)])

    def clear(self) -> None:
        self._kept.clear()
        self.num_tokens = 0

    def _evict_least_recent(self, excess: int) -> None:
        """Evicts at most `excess` tokens of the least recently used context. The beginning of a context stays."""
        owner, (since_s, num_tokens) = next(iter(self._kept.items()))
        if num_tokens <= excess:
            self._drop(owner)
        else:
            self._kept[owner] = since_s, num_tokens - excess
            self.num_tokens -= excess

    def _drop(self, owner: SampleKey) -> None:
        _, num_tokens = self._kept.pop(owner, (0.0, 0))
        self.num_tokens -= num_tokens


@dataclass(slots=True, eq=False)
class Stretch:
    """Consecutive decode steps of the same sequences: k steps take prefill_s + k first_s + k^2 reading_s."""

    steps: int
    num_running: int
    prefill_s: float
    first_s: float
    reading_s: float
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = self.prefill_s + self.steps * self.first_s + self.reading_s * self.steps**2

    def cut(self, steps: int) -> "Stretch":
        """Returns the stretch with at most `steps` steps."""
        return replace(self, steps=steps) if steps < self.steps else self

    def steps_in(self, seconds: float) -> int:
        """Returns the number of steps that begin within `seconds`."""
        seconds -= self.prefill_s
        if seconds <= 0:
            return 0
        first, reading = self.first_s, self.reading_s
        steps = (math.sqrt(first**2 + 4 * reading * seconds) - first) / (2 * reading) if reading else seconds / first
        return math.ceil(steps - 1e-9)


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
    has_begun: bool = False
    """True from its first stint on."""


class SimulatedBatch:
    """The running and the waiting sequences of an engine, with their tokens in the KV cache.

    A step of n sequences reads n more tokens than the one before, so k steps take a time quadratic in k.
    """

    def __init__(self, costs: RolloutCosts, length: Length, num_devices: int) -> None:
        self._costs, self._length = costs, length
        self.speed = costs.speed(num_devices)
        self._context_token_s = costs.context_token_s / costs.context_speed(num_devices)
        self.capacity = costs.cache_tokens(num_devices)
        """Tokens for which the KV cache has room."""
        self._reserve = int(HEADROOM * self.capacity)
        self._step_s = lru_cache(maxsize=costs.max_running)(costs.step_s)
        self.version = -1
        """Version of the weights; -1 for none."""
        self.older: Counter[int] = Counter()
        """Older version -> running sequences that end under it. The rows of each version are decoded separately."""
        self.waiting: deque[_Sequence] = deque()
        self.running: dict[str, _Sequence] = {}
        self._ends: list[tuple[int, int, _Sequence]] = []
        """Heap of (step, number of the stint, sequence). Entries of earlier stints are skipped."""
        self._prompts: dict[str, int] = {}
        """Prompt of running sequences -> number of these sequences."""
        self._num_stints = 0
        self._step = 0
        self.num_cached = 0
        """Tokens of the running sequences in the KV cache."""
        self.kept = KeptContexts(costs.eviction)
        self.due_s = 0.0
        """Seconds of work that precedes the next step, such as prompts to compute."""

    def add(self, requests: Sequence[Request]) -> None:
        self.waiting.extend([self._make_sequence(request) for request in requests])

    def advance(self, stretch: Stretch) -> int:
        """Runs the steps of a stretch. Returns the number of generated tokens."""
        num_tokens = stretch.steps * stretch.num_running
        self._step += stretch.steps
        self.num_cached += num_tokens
        return num_tokens

    def change_version(self, version: int, *, keeps_own: bool) -> None:
        """Changes the weights. keeps_own: sequences that have begun under the newest version keep it."""
        for sequence in self.running.values():
            self._book_tokens(sequence)
        if keeps_own:
            self._pin_version()
        self.version = version

    def _pin_version(self) -> None:
        """Keeps the weight version of all sequences that began under the newest version."""
        for sequence in [*self.running.values(), *self.waiting]:
            if sequence.own is None and (sequence.number or sequence.done):
                sequence.own = self.version
                self.older[self.version] += bool(sequence.number)

    def _make_sequence(self, request: Request) -> _Sequence:
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
            own=versions[-1][0] if versions and versions[-1][0] in self.older else None,
        )

    def admit(self, now_s: float) -> None:
        """Starts the sequences that fit. A prompt is computed unless another sample of it runs.

        Sequences that start together share the `intake_s` of a pass. now_s: time of the engine, in seconds.
        """
        num_stints = self._num_stints
        self._start_sequences(now_s)
        if self._num_stints > num_stints:
            self.due_s += self._costs.intake_s

    def _start_sequences(self, now_s: float) -> None:
        waiting, running = self.waiting, self.running
        while waiting and len(running) < self._costs.max_running:
            sequence = waiting[0]
            if running and self.num_cached + sequence.context + self._reserve > self.capacity:
                return
            waiting.popleft()
            found = 0
            if self.kept.num_tokens:
                found = self.kept.take(sequence.request, sequence.context, now_s)
            if not found and not sequence.done and not sequence.request.turn:
                found = sequence.context if sequence.request.uid in self._prompts else 0
            if not sequence.has_begun:  # a sequence that lost its cells returns no response in between
                self.due_s += self._costs.sequence_s
                sequence.has_begun = True
            self.due_s += (sequence.context - found) * self._costs.prefill_token_s / self.speed
            sequence.num_found = max(sequence.num_found, found)
            self._begin_stint(sequence)

    def _begin_stint(self, sequence: _Sequence) -> None:
        self._num_stints += 1
        sequence.began, sequence.number = self._step, self._num_stints
        self.running[sequence.request.id] = sequence
        if sequence.own is not None:
            self.older[sequence.own] += 1
        uid = sequence.request.uid
        self._prompts[uid] = self._prompts.get(uid, 0) + 1
        self.num_cached += sequence.context
        heapq.heappush(self._ends, (self._step + max(1, sequence.limit - sequence.done), sequence.number, sequence))

    @property
    def is_too_full(self) -> bool:
        num_running = len(self.running)
        return self.num_cached + num_running > self.capacity and num_running > 1

    def preempt(self) -> int:
        """Removes the youngest sequences until the cache has room for another step. Returns their number."""
        count = 0
        while self.is_too_full:
            sequence = self._end_stint(next(reversed(self.running.values())))
            self.waiting.appendleft(sequence)
            count += 1
        return count

    def look_ahead(self) -> list[Stretch]:
        """Returns the stretches until a sequence ends. If the cache fills up earlier, the youngest are preempted."""
        num_running, num_cached, step, ends = len(self.running), self.num_cached, self._step, self._ends
        while ends[0][1] != ends[0][2].number:
            heapq.heappop(ends)
        end, _, first_to_end = ends[0]
        found = [self._make_stretch(end - step, num_running, num_cached, self.due_s)]
        step += found[0].steps
        youngest = reversed(self.running.values())
        # No admission is possible here: the reserve covers at least one more step.
        while step < end and num_running <= self._reserve:
            num_cached += found[-1].steps * num_running
            while num_cached + num_running > self.capacity and num_running > 1:
                sequence = next(youngest)
                if sequence is first_to_end:
                    return found
                num_cached -= sequence.context + step - sequence.began
                num_running -= 1
            found.append(self._make_stretch(end - step, num_running, num_cached, 0.0))
            step += found[-1].steps
        return found

    def _make_stretch(self, most: int, num_running: int, num_cached: int, prefill_s: float) -> Stretch:
        """Returns a stretch of at most `most` steps: as many as fit into the cache, but at least one."""
        room = (self.capacity - num_cached) // num_running
        steps = max(1, room if room < most and num_running > 1 else most)
        reading = self._context_token_s * num_running / 2
        first = self._rows_s(num_running) / self.speed + self._context_token_s * (num_cached - num_running / 2)
        return Stretch(steps, num_running, prefill_s, first, reading)

    def _rows_s(self, num_running: int) -> float:
        """Returns the seconds of a step without context; the rows of each version are decoded one after another."""
        if not self.older:
            return self._step_s(num_running)
        newest = num_running - self.older.total()
        rows = [*self.older.values(), newest] if newest > 0 else self.older.values()
        return sum(map(self._step_s, rows))

    def finish(self, now_s: float) -> list[Response]:
        """Ends the sequences that have reached their limits. Returns their responses."""
        found, ends = [], self._ends
        while ends and ends[0][0] <= self._step:
            _, number, sequence = heapq.heappop(ends)
            if number == sequence.number:
                done = self._end_stint(sequence)
                if done.request.may_continue:
                    self.kept.keep(done.request, done.context - 1, now_s)
                found.append(_make_response(done, sequence.reason))
        return found

    def abort(self, request_id: str) -> Response | None:
        """Ends a sequence. Returns its tokens so far, or None if it has ended already."""
        if request_id in self.running:
            return _make_response(self._end_stint(self.running[request_id]), FinishReason.ABORTED)
        waiting = next((each for each in self.waiting if each.request.id == request_id), None)
        if waiting is None:
            return None
        self.waiting.remove(waiting)
        return _make_response(waiting, FinishReason.ABORTED)

    def _end_stint(self, sequence: _Sequence) -> _Sequence:
        del self.running[sequence.request.id]
        if sequence.own is not None:
            self.older[sequence.own] -= 1
            self.older += Counter()  # remove versions without running sequences
        uid, sequence.number = sequence.request.uid, 0
        left = self._prompts[uid] - 1
        if left:
            self._prompts[uid] = left
        else:
            del self._prompts[uid]
        self._book_tokens(sequence)
        self.num_cached -= sequence.context
        return sequence

    def _book_tokens(self, sequence: _Sequence) -> None:
        """Adds the tokens since a sequence's stint began to its total, under the version that serves it."""
        count = self._step - sequence.began
        if count:
            sequence.versions.append((self.version if sequence.own is None else sequence.own, count))
            sequence.done += count
            sequence.context += count
            sequence.began = self._step


def _make_response(sequence: _Sequence, reason: FinishReason) -> Response:
    versions = sequence.versions
    tagged = Runs.repeated(*versions[0]) if len(versions) == 1 else Runs(versions)
    zeros = Runs.repeated(0, len(tagged))
    return Response(
        request=sequence.request,
        token_ids=zeros,
        logprobs=zeros,
        versions=tagged,
        finish_reason=reason,
        num_cached_tokens=min(sequence.num_found, len(sequence.request.prompt_ids)),
    )
