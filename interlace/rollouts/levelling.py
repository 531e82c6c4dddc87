"""Deals what waits for engines that end their sequences before they swap to engines that need not wait."""

from collections.abc import Callable, Sequence

from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.engine_job import Job

Take = Callable[[Sequence[Job], list[EngineDriver]], None]
"""Dispatches jobs again, to these engines."""


class Levelling:
    """Requests that are queued for engines with new weights pending, which start none of them before they swapped.

    An engine that has swapped starts them under the same version, only earlier; what they draw is keyed by themselves.
    """

    def __init__(self, drivers: Sequence[EngineDriver], take: Take) -> None:
        self._drivers, self._take = drivers, take

    def fill(self, driver: EngineDriver) -> None:
        """Gives an engine that starts sequences what waits for others, from the one with most to do."""
        sources = [other for other in self._drivers if other.num_queued and not other.starts_new and not other.is_away]
        for source in sorted(sources, key=lambda other: -other.load.live_tokens):
            if jobs := source.give(driver):
                self._take(jobs, [driver])
