"""Meter of an engine's work, from its driver's view. The goodput ledger reads the repeated part of the work from it."""

from collections.abc import Sequence

from interlace.core.progress import Progress
from interlace.core.types import FinishReason, Response
from interlace.runtime.timeline import EngineCall, Span, Timeline, TurnEnd, TurnStart
from interlace.runtime.typed_group import TypedGroup


class GenerationMeter:
    """Counts the tokens that enter and leave one engine."""

    def __init__(self, group: TypedGroup, timeline: Timeline) -> None:
        self._group, self._timeline = group, timeline
        self._cached_tokens = 0
        self._repeated_tokens = self._prompt_tokens = 0
        self._histories: dict[str, int] = {}
        """For each running turn, the context tokens from earlier turns, which the engine reuses or recomputes."""
        self._begun: list[TurnStart] = []

    def submit(self, request_id: str, num_prompt: int, num_generated: int, num_history: int) -> None:
        """Records the tokens of a request of the next call: prompt, response so far, and context of earlier turns."""
        self._cached_tokens += num_prompt + num_generated
        if num_generated:
            self._repeated_tokens += num_prompt + num_generated
        else:
            self._prompt_tokens += num_prompt - num_history
            if num_history:
                self._histories[request_id] = num_history

    def begin_turn(self, turn: TurnStart) -> None:
        """Records a turn of the next call. Turns outside the flow, such as those of an evaluation, are left out."""
        if _is_of_flow(turn):
            self._begun.append(turn)

    def recompute(self) -> None:
        """Records that the engine recomputes the KV cache of its running sequences."""
        self._repeated_tokens += self._cached_tokens

    def take_out(self, span: Span, responses: Sequence[Response]) -> list[TurnEnd]:
        """Records sequences that left the engine with a call. Returns the ended turns of the flow. span: see end()."""
        ended = []
        for done in responses:
            self._cached_tokens -= len(done.request.prompt_ids) + len(done.token_ids)
            # The engine reports reused tokens only now, so recomputed tokens count for this call.
            self._repeated_tokens += max(0, self._histories.pop(done.request.id, 0) - done.num_cached_tokens)
            turn = TurnEnd(*done.request.owner, done.request.turn, len(done.token_ids))
            if _is_of_flow(turn) and done.finish_reason != FinishReason.ABORTED:
                ended.append(turn)
        span.finished_groups = [turn.gid for turn in ended]
        return ended

    def forget(self) -> None:
        """Records that the engine's process ended with its running sequences, which begin again."""
        self._cached_tokens = self._repeated_tokens = self._prompt_tokens = 0
        self._histories.clear()
        self._begun.clear()

    def drop(self, num_tokens: int) -> None:
        """Records the tokens of a sample that ended before it was finished."""
        self._timeline.drop_tokens(num_tokens)

    def end(self, span: Span, progress: Progress, num_queued: int) -> EngineCall:
        """Records the end of a call. Returns the work of the call.

        span: span of rank 0. num_queued: requests that were not submitted to the engine yet.
        """
        num_held_tokens = self._cached_tokens + progress.num_new_tokens / 2
        self._cached_tokens += progress.num_new_tokens
        ended = self.take_out(span, progress.responses)
        reasons = [response.finish_reason for response in progress.responses]
        num_finished = len(reasons) - reasons.count(FinishReason.ABORTED)
        served = EngineCall(
            span=span,
            devices=self._group.device_indices,
            batch=progress.num_running + num_finished,
            num_new_tokens=progress.num_new_tokens,
            num_prompt_tokens=self._prompt_tokens,
            num_repeated_tokens=self._repeated_tokens,
            num_running=progress.num_running,
            num_queued=num_queued + progress.num_waiting,
            num_waiting=progress.num_waiting,
            num_preemptions=progress.num_preemptions,
            kv_use=progress.kv_use,
            num_held_tokens=num_held_tokens,
            begun=tuple(self._begun),
            ended=tuple(ended),
        )
        self._begun.clear()
        self._repeated_tokens = self._prompt_tokens = 0
        self._timeline.serve(served)
        return served


def _is_of_flow(turn: TurnStart | TurnEnd) -> bool:
    """Returns whether a turn belongs to a sample of the flow, and not to an evaluation or a baseline."""
    return turn.gid >= 0 and turn.number >= 0
