"""Token budget of samples between two publications (`rollout_budget`), and the suspended requests."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from interlace.core.types import Completion, FinishReason, Request, SampleKey
from interlace.rollouts.engine_job import Job
from interlace.runtime.timeline import Timeline
from interlace.schedule.lengths import MeanLength
from interlace.schedule.schedule import Schedule


class TokenBudget:
    """Limits the tokens that a sample generates between two publications, over all its turns.

    Consumes: jobs before their dispatch (`limit_jobs`), and completions (`charge`).
    Produces: jobs with a smaller limit, and suspended jobs.
    Waits for: nothing. Suspended jobs stay here until `renew`.
    """

    def __init__(
        self, schedule: Schedule, timeline: Timeline, *, expected_tokens: int, on_suspended: Callable[[], None]
    ) -> None:
        """expected_tokens: tokens of a response, until one has ended. on_suspended: called after each suspension."""
        self._schedule, self._timeline, self._on_suspended = schedule, timeline, on_suspended
        self._mean_length = MeanLength(float(expected_tokens))
        self.suspended: dict[str, Job] = {}
        """Suspended jobs by request."""
        self.num_suspensions = 0
        """Number of suspensions since the start."""
        self._spent: dict[SampleKey, int] = {}
        """Tokens of a sample's requests since the last publication. Empty without a budget."""

    def __bool__(self) -> bool:
        """Returns whether the schedule has a budget. Without one, no job needs a limit."""
        return self.tokens is not None

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of the responses so far."""
        return self._mean_length.tokens

    @property
    def tokens(self) -> int | None:
        """Tokens that a sample may generate between two publications. None without a limit."""
        return self._schedule.budget_tokens(self._mean_length.tokens)

    def limit_request(self, request: Request, max_new_tokens: int) -> Request:
        """Lowers the limit of a request to the whole budget. max_new_tokens: limit without the budget."""
        if (tokens := self.tokens) is None:
            return request
        return _limit_request(request, min(max_new_tokens, len(request.generated_ids) + tokens))

    def limit_jobs(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Limits jobs to the budget that earlier turns left, and suspends those without any. Returns the others."""
        return [limited for job in jobs if (limited := self._limit_job(job))] if self._spent else jobs

    def _limit_job(self, job: Job) -> Job | None:
        spent = self._spent.get(job.request.owner, 0)
        if self.tokens is None or not spent:
            return job
        left = self.tokens - spent
        if left <= 0:
            self.suspend(job)
            return None
        return replace(job, request=_limit_request(job.request, min(job.request.params.max_new_tokens, left)))

    def charge(self, job: Job, done: Completion) -> bool:
        """Records the tokens of a completion. Returns whether only the budget ended it, so that it is to continue."""
        if self.tokens is None or job.max_new_tokens is None:
            return False
        owner = done.request.owner
        self._spent[owner] = self._spent.get(owner, 0) + len(done.token_ids) - job.num_before
        return done.finish_reason == FinishReason.LENGTH and len(done.token_ids) < job.max_new_tokens

    def suspend(self, job: Job) -> None:
        """Keeps a job until its budget is renewed."""
        self.suspended[job.request.id] = job
        self.num_suspensions += 1
        self._on_suspended()

    def renew(self, gids: Sequence[int] | None) -> list[Job]:
        """Renews the budget of samples of these groups, or of all if None. Returns their suspended jobs."""
        chosen = [name for name, job in self.suspended.items() if gids is None or job.request.owner.gid in gids]
        jobs = [self.suspended.pop(name) for name in chosen]
        if gids is None:
            self._spent.clear()
        for job in jobs:
            self._spent.pop(job.request.owner, None)
        return jobs

    def withdraw(self, request_id: str) -> None:
        """Removes a suspended job, if this request has one."""
        if job := self.suspended.pop(request_id, None):
            self._timeline.drop_tokens(len(job.request.generated_ids))

    def end(self, owner: SampleKey) -> None:
        """Forgets a sample that has ended."""
        self._spent.pop(owner, None)

    def observe(self, num_tokens: int) -> None:
        """Records the length of a finished response, in tokens."""
        self._mean_length.observe(num_tokens)


def _limit_request(request: Request, max_new_tokens: int) -> Request:
    if request.query_ids:
        return request  # parallel decoding draws all tokens in one pass
    return replace(request, params=request.params.model_copy(update={"max_new_tokens": max_new_tokens}))
