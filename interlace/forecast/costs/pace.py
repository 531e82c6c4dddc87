"""Duration of work that other running work slows down, or that waits for the controller."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from interlace.forecast.profile.types import CONTROLLER, Profile
from interlace.runtime.sim.loop import virtual_loop


@dataclass(slots=True, eq=False, kw_only=True)
class PacedWork:
    """A running piece of work."""

    role: str
    seconds: float
    """Time that the work takes while nothing else runs."""
    ended: "asyncio.Future[None]"
    left_s: float
    since_s: float
    call_share: float = 0.0
    """Share of the constant part of a call in the work; see Interference."""
    slowdown: float = 1.0
    timer: asyncio.TimerHandle | None = field(default=None)
    """Timer of the end of the work, if other work can delay it."""

    def stop(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class ControllerTime:
    """Time of the controller, one thread that forwards samples and starts every call, one after another."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        """The current event loop must be a VirtualLoop. on_change: called when is_busy changes; if None, never set."""
        self._loop, self._free_s, self._on_change = virtual_loop(), 0.0, on_change
        self.is_busy = False

    def spend(self, seconds: float) -> float:
        """Adds work after all earlier work. Returns the time at which it ends."""
        self._free_s = max(self._loop.now_s, self._free_s) + seconds
        if self._on_change and not self.is_busy:
            self._update_busy()
        return self._free_s

    def _update_busy(self) -> None:
        is_busy, left_s = self.is_busy, self._free_s - self._loop.now_s
        self.is_busy = left_s > 0
        if self.is_busy:
            self._loop.call_later(left_s, self._update_busy)
        if self._on_change and self.is_busy != is_busy:
            self._on_change()

    async def wait(self) -> None:
        """Waits until the controller can start a call."""
        left_s = self._free_s - self._loop.now_s
        if left_s > 0:
            await self._loop.alarm(left_s)


class Pace:
    """Speed of jobs that interfere: a job is slower while others run; each start or end changes the speed of all."""

    def __init__(self, profile: Profile) -> None:
        """The current event loop must be a VirtualLoop."""
        self._loop = virtual_loop()
        self._pairs = {(pair.role, pair.beside): pair for pair in profile.interference}
        self._roles = {role for pair in self._pairs for role in pair}
        self.controller = ControllerTime(self._update_progress if CONTROLLER in self._roles else None)
        self._jobs: dict[PacedWork, None] = {}

    def begin(self, role: str, seconds: float, call_share: float = 0.0) -> PacedWork:
        """Starts work that takes `seconds` while nothing else runs. The caller must await finish().

        call_share: share of the constant part of a call in the work.
        """
        loop, is_alone = self._loop, role not in self._roles
        ended = loop.alarm(seconds) if is_alone else loop.create_future()
        job = PacedWork(
            role=role, seconds=seconds, left_s=seconds, since_s=loop.now_s, ended=ended, call_share=call_share
        )
        if not is_alone:
            self._jobs[job] = None
            self._update_progress()
        return job

    async def finish(self, job: PacedWork) -> float:
        """Waits for the end of a job. Returns the seconds of work that were done: fewer than all if it was stopped."""
        try:
            await job.ended
        finally:
            job.left_s -= (self._loop.now_s - job.since_s) / job.slowdown
            if job in self._jobs:
                del self._jobs[job]
                if job.timer:
                    job.timer.cancel()
                self._update_progress()
        return job.seconds - max(0.0, job.left_s)

    async def work(self, role: str, seconds: float, call_share: float = 0.0) -> None:
        if seconds > 0:
            await self.finish(self.begin(role, seconds, call_share))

    def _update_progress(self) -> None:
        """Updates the progress and the speed of every job after other work began or ended."""
        now = self._loop.now_s
        for job in self._jobs:
            job.left_s -= (now - job.since_s) / job.slowdown
            job.since_s = now
            job.slowdown = self._find_slowdown(job)
            if job.timer:
                job.timer.cancel()
            job.timer = self._loop.call_later(max(0.0, job.left_s) * job.slowdown, job.stop)

    def _find_slowdown(self, job: PacedWork) -> float:
        """Returns the relative duration of a job while the other jobs run; slowdowns add up."""
        pairs, total = self._pairs, 1.0
        for other in self._jobs:
            if other is not job and (pair := pairs.get((job.role, other.role))):
                total += pair.at(max(job.call_share, other.call_share)) - 1
        if self.controller.is_busy and (pair := pairs.get((job.role, CONTROLLER))):
            total += pair.at(job.call_share) - 1
        return total
