"""Simulated rollout engine: a batch of sequences that takes the time that a profile gives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from interlace.core.progress import Progress
from interlace.core.types import Metrics, Request, Response, SampleKey
from interlace.forecast.costs.batch import Length, SimulatedBatch
from interlace.forecast.costs.pace import Pace, PacedWork
from interlace.forecast.profile.types import RolloutCosts
from interlace.runtime.sim.loop import virtual_loop
from interlace.runtime.worker import Worker, WorkerContext, operation
from interlace.weights.ref import UpdateMode, WeightRef

ROLE = "rollout"


@dataclass(slots=True, eq=False, kw_only=True)
class _Tally:
    """Counts of one call."""

    num_new_tokens: int = 0
    num_preemptions: int = 0
    max_cached: int = 0


class SimulatedEngine(Worker):
    """Serves requests in the time that a profile gives: prefill, decode by batch and context, preemption."""

    def __init__(self, context: WorkerContext, costs: RolloutCosts, length: Length, pace: Pace) -> None:
        super().__init__(context)
        self._costs, self._pace, self._loop = costs, pace, virtual_loop()
        self._num_devices = max(1, len(context.devices))
        self.batch = SimulatedBatch(costs, length, self._num_devices)
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
        await self._pace.controller.wait()
        until_s = loop.now_s + self._costs.min_call_s
        batch = self.batch
        responses = [found for request_id in aborts if (found := batch.abort(request_id))]
        if ended:
            batch.kept.release(ended)
        batch.due_s += self._costs.call_s
        if requests:
            batch.add(requests)
        tally = _Tally()
        while not self._interrupted:
            if batch.waiting:
                batch.admit(loop.now_s)
            if not batch.running:
                break
            if batch.is_too_full:
                self._preempt_youngest(tally)
            if batch.kept.num_tokens:
                batch.kept.fit(batch.capacity - batch.num_cached, loop.now_s)
            await self._decode_steps(tally, until_s - loop.now_s if responses else math.inf)
            responses += batch.finish(loop.now_s)
            if responses and loop.now_s >= until_s:
                break
        self._interrupted = False
        return Progress(
            responses=tuple(responses),
            num_running=len(batch.running),
            num_waiting=len(batch.waiting),
            num_new_tokens=tally.num_new_tokens,
            kv_use=tally.max_cached / batch.capacity,
            num_preemptions=tally.num_preemptions,
        )

    @operation(on_device=False, concurrent=True)
    def interrupt(self) -> None:
        """Makes a running serve() return after its current step."""
        self._interrupted = True
        if self._job:
            self._job.stop()

    @operation(on_device=False, concurrent=True)
    def expect_weights(self, ref: WeightRef) -> None:
        """Does nothing: the content of simulated weights is in no store."""

    @operation(bin="switch", phase="rollout")
    async def abort(self) -> tuple[Response, ...]:
        """Ends all sequences and returns their tokens so far, for resubmission."""
        ids = [*self.batch.running, *(sequence.request.id for sequence in self.batch.waiting)]
        return tuple(found for request_id in ids if (found := self.batch.abort(request_id)))

    @operation(bin="weight_sync")
    async def update_weights(self, ref: WeightRef, mode: UpdateMode) -> None:
        """Replaces all weights. `recompute` recomputes the cache; `own` lets running sequences keep their version."""
        seconds = self._costs.update_s
        if mode == "recompute":
            seconds += self.batch.num_cached * self._costs.prefill_token_s / self.batch.speed
            self.batch.kept.clear()
        await self._pace.work(ROLE, seconds)
        self.batch.change_version(ref.version, keeps_own=mode == "own")

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
            "num_running": float(len(self.batch.running)),
            "older_versions": float(len(self.batch.older)),
        }

    @operation(on_device=False)
    def recover(self) -> str:
        """Forgets the weights, as a new process has none. Returns no reason: it always succeeds."""
        self.batch.version = -1
        return ""

    async def onload(self) -> None:
        """Loads the state, and the cache if offload() moved it. The next call recomputes a dropped cache."""
        await self._move_state(self._costs.onload_s, self._kv_away == "offload")
        if self._kv_away == "recompute":
            self.batch.due_s += self.batch.num_cached * self._costs.prefill_token_s / self.batch.speed
        self._kv_away = None

    async def offload(self, kv: Literal["offload", "recompute"] = "offload") -> None:
        """Unloads the state. kv: whether the cache of running sequences is moved or dropped."""
        if kv == "recompute":
            self.batch.kept.clear()
        await self._move_state(self._costs.offload_s, kv == "offload")
        self._kv_away = kv

    async def _move_state(self, state_s: float, with_kv: bool) -> None:
        kv_s = (self.batch.num_cached + self.batch.kept.num_tokens) * self._costs.kv_token_s if with_kv else 0.0
        await self._pace.work(ROLE, (state_s + kv_s) / self._num_devices)

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return self._costs.memory_bytes(self._num_devices)

    def _preempt_youngest(self, tally: _Tally) -> None:
        count = self.batch.preempt()
        tally.num_preemptions += count
        self._num_preemptions += count

    async def _decode_steps(self, tally: _Tally, left_s: float) -> None:
        """Waits until the next sequence ends, `left_s` have passed or a caller interrupts. Finishes a started step."""
        stretches = self.batch.look_ahead()
        self.batch.due_s = 0.0
        if left_s < math.inf:
            stretches = [stretches[0].cut(max(1, stretches[0].steps_in(left_s)))]
        self._job = self._pace.begin(ROLE, sum([each.seconds for each in stretches]))
        done_s = await self._pace.finish(self._job)
        self._job = None
        for place, each in enumerate(stretches):
            if place:
                self._preempt_youngest(tally)
            stretch = each.cut(each.steps_in(done_s)) if self._interrupted else each
            seconds = stretch.seconds
            tally.num_new_tokens += self.batch.advance(stretch)
            tally.max_cached = max(tally.max_cached, self.batch.num_cached)
            if self._interrupted and done_s < seconds:
                await self._pace.work(ROLE, seconds - done_s)
                return
            done_s -= seconds
