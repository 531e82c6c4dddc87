"""Duration of work that other running work slows down, or that waits for the controller."""

import asyncio
from dataclasses import dataclass, field

from interlace.forecast.profile.types import Profile
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
    slowdown: float = 1.0
    timer: asyncio.TimerHandle | None = field(default=None)
    """Timer of the end of the work, if other work can delay it."""

    def stop(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class ControllerTime:
    """Time of the controller, one thread that forwards samples and starts every call, one after another."""

    def __init__(self) -> None:
        """The current event loop must be a VirtualLoop."""
        self._loop, self._free_s = virtual_loop(), 0.0

    def spend(self, seconds: float) -> float:
        """Adds work after all earlier work. Returns the time at which it ends."""
        self._free_s = max(self._loop.now_s, self._free_s) + seconds
        return self._free_s

    async def wait(self) -> None:
        """Waits until the controller can start a call."""
        left_s = self._free_s - self._loop.now_s
        if left_s > 0:
            await self._loop.alarm(left_s)


class Pace:
    """Speed of jobs that interfere: a job is slower while others run; each start or end changes the speed of all."""

    def __init__(self, profile: Profile) -> None:
        """The current event loop must be a VirtualLoop."""
        self._profile, self._loop = profile, virtual_loop()
        self._roles = {pair.role for pair in profile.interference} | {pair.beside for pair in profile.interference}
        self.controller = ControllerTime()
        self._jobs: dict[PacedWork, None] = {}

    def begin(self, role: str, seconds: float) -> PacedWork:
        """Starts work that takes `seconds` while nothing else runs. The caller must await finish()."""
        loop, is_alone = self._loop, role not in self._roles
        ended = loop.alarm(seconds) if is_alone else loop.create_future()
        job = PacedWork(role=role, seconds=seconds, left_s=seconds, since_s=loop.now_s, ended=ended)
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

    async def work(self, role: str, seconds: float) -> None:
        if seconds > 0:
            await self.finish(self.begin(role, seconds))

    def _update_progress(self) -> None:
        """Updates the progress and the speed of every job after a job began or ended."""
        now = self._loop.now_s
        for job in self._jobs:
            job.left_s -= (now - job.since_s) / job.slowdown
            job.since_s = now
            others = [other.role for other in self._jobs if other is not job]
            job.slowdown = self._profile.slowdown(job.role, others)
            if job.timer:
                job.timer.cancel()
            job.timer = self._loop.call_later(max(0.0, job.left_s) * job.slowdown, job.stop)
