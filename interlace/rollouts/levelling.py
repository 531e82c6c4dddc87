"""Moves requests that are queued on draining engines to engines that have already swapped weights."""

from collections.abc import Callable, Sequence

from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.engine_job import Job

Take = Callable[[Sequence[Job], list[EngineDriver]], None]
"""Dispatches jobs again, to the given engines."""


class Levelling:
    """Moves queued requests from engines with pending weights, which start none before the swap.

    An engine that has swapped starts them earlier under the same version. The samples do not change, because the
    request is the key of its sampling noise.
    """

    def __init__(self, drivers: Sequence[EngineDriver], take: Take) -> None:
        self._drivers, self._take = drivers, take

    def fill(self, driver: EngineDriver) -> None:
        """Gives an engine queued requests of other engines, first from the engine with the largest load."""
        sources = [
            other
            for other in self._drivers
            if other.jobs.num_queued and not other.weights.starts_new and not other.is_away
        ]
        for source in sorted(sources, key=lambda other: -other.load.live_tokens):
            if jobs := source.jobs.give(driver.calls.room, driver.load.live_tokens):
                self._take(jobs, [driver])
