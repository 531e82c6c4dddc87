"""Jobs of one engine, the queue of those that wait, and the receiver of their responses."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from interlace.core.progress import Draft
from interlace.core.types import Request, Response
from interlace.runtime.decode_curve import DecodeCurve
from interlace.schedule.dispatch import Load

Deliver: TypeAlias = Callable[[Response], None]
OnDraft: TypeAlias = Callable[[Draft], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """A request and the receiver of its response."""

    request: Request
    order: float
    """Priority among jobs that have not started: the smallest is first. Jobs that have tokens precede all others."""
    expected_tokens: float
    deliver: Deliver
    """Called with the response."""
    on_draft: OnDraft | None = None
    """Called with each draft before the response, if the request streams."""
    max_new_tokens: int | None
    """Limit that the caller requested; a budget may lower the request's limit below it. None outside the flow."""
    asked_s: float = 0.0
    """Time of the request, in seconds of the run's clock. 0 outside the flow."""
    num_before: int = 0
    """Generated tokens of the request when its budget was set."""
    num_history: int = 0
    """Tokens of the context that belong to earlier turns of the sample."""

    @property
    def started(self) -> bool:
        """True if the job is a partial, which already has generated tokens."""
        return bool(self.request.generated_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that the engine holds when the job begins."""
        return self.request.num_prompt_tokens + self.request.num_tokens


class ResponseReceiver(Protocol):
    """Receiver of the reports of an engine's calls."""

    curve: DecodeCurve | None
    """Decode speed, fitted to each call. None if the dispatch policy does not use it."""
    on_response: Callable[[Job, Response], None]
    """Called with the response of each job that ended."""


class EngineJobs:
    """Jobs that were given to an engine and have not ended. A job waits in the queue, and then runs.

    Jobs that have tokens precede new ones; then the smallest `order` is first.
    """

    def __init__(self, on_queue: Callable[[], object] = bool) -> None:
        """on_queue: called after the queue got its first job or lost its last."""
        self._on_queue = on_queue
        self.load = Load(num_requests=0, live_tokens=0.0)
        """Number and expected tokens of all jobs."""
        self.running: dict[str, Job] = {}
        """Jobs that were submitted to the engine, by request."""
        self._queued: dict[str, Job] = {}
        self._heap: list[tuple[bool, float, int, Job]] = []
        """Order of the queue. Entries whose job left the queue are skipped."""
        self._num_added = 0

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def add(self, job: Job) -> None:
        self._num_added += 1
        self.load.change(1, job.expected_tokens)
        self._queued[job.request.id] = job
        heapq.heappush(self._heap, (not job.started, job.order, self._num_added, job))
        if len(self._queued) == 1:
            self._on_queue()

    def first(self) -> Job | None:
        while self._heap and self._queued.get(self._heap[0][3].request.id) is not self._heap[0][3]:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def start_first(self) -> Job:
        """Moves the first queued job, which first() returned, to the running ones. Returns it."""
        job = heapq.heappop(self._heap)[3]
        self.running[job.request.id] = self._queued.pop(job.request.id)
        if not self._queued:
            self._on_queue()
        return job

    def remove_queued(self, request_id: str) -> Job | None:
        """Removes a job from the queue. Returns None if it is not there."""
        job = self._queued.pop(request_id, None)
        if job is not None and not self._queued:
            self._on_queue()
        return self._forget_job(job)

    def end_running(self, request_id: str) -> Job | None:
        """Ends a running job. Returns None if no job runs for this request."""
        return self._forget_job(self.running.pop(request_id, None))

    def take_queue(self) -> list[Job]:
        queued = [job for _, _, _, job in sorted(self._heap) if self._queued.get(job.request.id) is job]
        self._heap.clear()
        for job in queued:
            self.remove_queued(job.request.id)
        return queued

    def give(self, most: float, live_tokens: float) -> list[Job]:
        """Removes queued jobs that have not started, while the load of the taker stays the smaller one. Returns them.

        most: number of jobs that the taker has room for. live_tokens: expected tokens of its jobs so far.
        """
        started, given = [], list[Job]()
        while (job := self.first()) and len(given) < most:
            if job.started:
                started.append(heapq.heappop(self._heap))
                continue
            live_tokens += job.expected_tokens
            if live_tokens > self.load.live_tokens - job.expected_tokens:
                break
            self.remove_queued(job.request.id)
            given.append(job)
        for entry in started:
            heapq.heappush(self._heap, entry)
        return given

    def _forget_job(self, job: Job | None) -> Job | None:
        if job is not None:
            self.load.change(-1, -job.expected_tokens)
        return job
