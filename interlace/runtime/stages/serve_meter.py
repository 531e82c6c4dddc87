"""What a rollout engine computes, seen from its driver: the goodput ledger asks how much of it was done before."""

from collections.abc import Sequence
from typing import Any

from interlace.core.types import FinishReason, Progress, Request, Response
from interlace.runtime.clock import Clock
from interlace.runtime.group import WorkerGroup
from interlace.runtime.timeline import Served, Timeline


class ServeMeter:
    """Counts tokens into one engine and out of it."""

    def __init__(self, group: WorkerGroup[Any], clock: Clock, timeline: Timeline) -> None:
        self._group, self._clock, self._timeline = group, clock, timeline
        self._cached_tokens = 0
        self._repeated_tokens = self._prompt_tokens = 0
        self._start_s = 0.0

    def submit(self, requests: Sequence[Request]) -> None:
        """A call begins, and takes these in."""
        self._start_s = self._clock.now()
        for request in requests:
            num_tokens = len(request.prompt_ids) + len(request.generated_ids)
            self._cached_tokens += num_tokens
            if request.generated_ids:
                self._repeated_tokens += num_tokens
            else:
                self._prompt_tokens += num_tokens

    def recompute(self) -> None:
        """The engine forgets what it computed of its running sequences, and computes it again."""
        self._repeated_tokens += self._cached_tokens

    def take_out(self, response: Response) -> None:
        """A sequence left the engine."""
        done = response.completion
        self._cached_tokens -= len(done.request.prompt_ids) + len(done.token_ids)

    def drop(self, num_tokens: int) -> None:
        """Tokens of a sample that ended before it was finished."""
        self._timeline.drop_tokens(num_tokens)

    def end(self, progress: Progress) -> None:
        """The call ended."""
        self._cached_tokens += progress.num_new_tokens
        for response in progress.responses:
            self.take_out(response)
        reasons = [response.completion.finish_reason for response in progress.responses]
        num_finished = len(reasons) - reasons.count(FinishReason.ABORTED)
        served = Served(
            start_s=self._start_s,
            end_s=self._clock.now(),
            devices=self._group.device_indices,
            group=self._group.name,
            batch=progress.num_running + num_finished,
            num_new_tokens=progress.num_new_tokens,
            num_prompt_tokens=self._prompt_tokens,
            num_repeated_tokens=self._repeated_tokens,
        )
        self._repeated_tokens = self._prompt_tokens = 0
        self._timeline.serve(served)
