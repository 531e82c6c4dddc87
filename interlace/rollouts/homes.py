"""KV-cache affinity of samples with several turns, and the share of earlier turns' tokens that engines reuse."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from interlace.core.trajectory import count_common
from interlace.core.types import Metrics, Request, Response, SampleKey
from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.engine_jobs import Job
from interlace.schedule.routing import KeptContext


@dataclass(frozen=True, kw_only=True, slots=True)
class _Home:
    driver: EngineDriver
    num_tokens: int
    """Computed tokens of the last turn's context and answer."""
    version: int
    """Version that the engine served at the end of the last turn."""
    last: Response
    """Response of the last turn."""


class Homes:
    """Tracks the engine of each sample's last turn, which holds the sample's KV cache."""

    def __init__(self, *, keeps_old: bool) -> None:
        """keeps_old: whether engines retain KV caches of older weights."""
        self.keeps_old = keeps_old
        self._homes: dict[SampleKey, _Home] = {}
        self._num_history = self._num_reused = 0
        """Context tokens from earlier turns since the last call of metrics(), and the reused ones among them."""

    def __bool__(self) -> bool:
        """Returns whether any sample has a turn to continue. No other method matters before."""
        return bool(self._homes)

    def find_kept(
        self, jobs: Sequence[Job], find_place: Callable[[EngineDriver], int | None]
    ) -> list[KeptContext | None]:
        """Returns the retained context of each job. find_place: returns the index of an engine, if it may be chosen."""
        return [self._find_context(job, find_place) for job in jobs]

    def _find_context(self, job: Job, find_place: Callable[[EngineDriver], int | None]) -> KeptContext | None:
        home = self._homes.get(job.request.owner)
        place = None if home is None else find_place(home.driver)
        if home is None or place is None:
            return None
        if home.version != home.driver.version and not self.keeps_old:
            return None
        return KeptContext(engine=place, num_tokens=home.num_tokens)

    def record_engine(self, job: Job, driver: EngineDriver) -> None:
        """Records the engine of a job, and releases the context that another engine retained for the sample."""
        home = self._homes.get(job.request.owner)
        if home is not None and home.driver is not driver:
            home.driver.calls.release(job.request.owner)

    def record_turn(self, done: Response, driver: EngineDriver) -> None:
        """Records that an engine finished a turn of a sample that may have further turns."""
        request = done.request
        before = self._homes.get(request.owner)
        if before is not None:
            if before.driver is not driver:  # of a concurrent turn
                before.driver.calls.release(request.owner)
            history = min(before.num_tokens, len(request.prompt_ids))
            self._num_history += history
            self._num_reused += min(history, done.num_cached_tokens)
        num_tokens = len(request.prompt_ids) + len(done.token_ids) - 1
        self._homes[request.owner] = _Home(driver=driver, num_tokens=num_tokens, version=driver.version, last=done)

    def history(self, request: Request) -> int:
        """Counts the common tokens at the beginning of a request's context and of its sample's last turn."""
        home = self._homes.get(request.owner)
        if home is None:
            return 0
        computed = np.concatenate([np.asarray(home.last.request.prompt_ids), np.asarray(home.last.token_ids[:-1])])
        return count_common(np.asarray(request.prompt_ids), computed)

    def end(self, owner: SampleKey) -> None:
        home = self._homes.pop(owner, None)
        if home is not None:
            home.driver.calls.release(owner)

    def metrics(self) -> Metrics:
        """Returns the reused share of earlier turns' tokens since the last call. Empty if no turn followed another."""
        if not self._num_history:
            return {}
        share = self._num_reused / self._num_history
        self._num_history = self._num_reused = 0
        return {"history_reused": share}
