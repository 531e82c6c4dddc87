"""Speculative rounds: a step launches more groups than it needs and takes the first to finish."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.prompts import PromptSource
from interlace.core.types import Prompt
from interlace.schedule.schedule import Oversample, TailBatching


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A group to admit."""

    prompt: Prompt
    num_samples: int
    ended: Sequence[int] = ()
    """Indices of samples that ended before the run was resumed, and are not drawn again."""

    @property
    def indices(self) -> Sequence[int]:
        """Returns the indices of the samples to draw."""
        indices = range(self.num_samples)
        return [index for index in indices if index not in self.ended] if self.ended else indices


class Rounds:
    """Rounds of a run: the launched and the accepted groups of each step, and the treatment of slow prompts.

    A group is accepted once `samples_per_prompt` of its samples are generated. A round is full when `prompts_per_step`
    places are accepted or stay empty. A round is a step, so the schedule must be synchronous.
    """

    def __init__(
        self, tail: Oversample | TailBatching, source: PromptSource, *, prompts_per_step: int, samples_per_prompt: int
    ) -> None:
        self._tail, self._source = tail, source
        self._prompts_per_step, self._samples_per_prompt = prompts_per_step, samples_per_prompt
        self._waiting: deque[tuple[Prompt, int]] = deque()
        self._number = 0
        self.is_open = False
        """True while a round is in progress."""
        self._generated: dict[int, int] = {}
        self._accepted: dict[int, None] = {}
        self._num_empty = 0

    @property
    def waiting_prompts(self) -> list[Prompt]:
        """Prompts kept for a round of long prompts."""
        return [prompt for prompt, _ in self._waiting]

    @property
    def exhausted(self) -> bool:
        """True if no prompt is left for another round."""
        return self._source.exhausted and not self._waiting

    @property
    def is_full(self) -> bool:
        """True if enough groups are accepted. The other groups are then surplus."""
        return len(self._accepted) + self._num_empty == self._prompts_per_step

    def begin(self) -> list[Launch]:
        """Opens a round. Returns its groups."""
        self._number += 1
        self.is_open = True
        if self._is_long_due():
            return self._draw_launches(self._prompts_per_step, self._samples_per_prompt, from_waiting=True)
        groups = _multiply_count(self._prompts_per_step, self._tail.prompts)
        return self._draw_launches(
            groups, _multiply_count(self._samples_per_prompt, self._tail.responses), from_waiting=False
        )

    def refill(self) -> Launch:
        """Returns a group that replaces a dropped one, without speculation. Must not be called if `exhausted`."""
        return self._draw_launches(1, self._samples_per_prompt, from_waiting=False)[0]

    def generated(self, gid: int) -> bool:
        """Counts a generated sample of a group. Returns whether this completes the group."""
        count = self._generated[gid] = self._generated.get(gid, 0) + 1
        if count == self._samples_per_prompt:
            self._accepted[gid] = None
        return count == self._samples_per_prompt

    def redrawn(self, gid: int) -> None:
        """Takes back a generated sample that is drawn again, unless its group is accepted."""
        if gid not in self._accepted:
            self._generated[gid] -= 1

    def is_accepted(self, gid: int) -> bool:
        """Returns whether a group counts for its round."""
        return gid in self._accepted

    def dropped(self, gid: int) -> None:
        """Removes a group that was filtered out or failed. It no longer counts."""
        self._accepted.pop(gid, None)

    def count_empty_place(self) -> None:
        """Counts a place that no group will take."""
        self._num_empty += 1

    def keep_for_later_round(self, prompt: Prompt) -> None:
        """Keeps a prompt whose group was not needed, for a later round."""
        if isinstance(self._tail, TailBatching):
            self._waiting.append((prompt, self._number))
        else:
            self._source.hand_back([prompt])

    def end(self) -> None:
        self.is_open = False
        self._generated.clear()
        self._accepted.clear()
        self._num_empty = 0

    def _is_long_due(self) -> bool:
        if not isinstance(self._tail, TailBatching) or not self._waiting:
            return False
        # Without max_age a prompt that is always among the slowest would starve (RollPacker has no such limit).
        is_old = self._number - self._waiting[0][1] >= self._tail.max_age
        return len(self._waiting) >= self._prompts_per_step or is_old or self._source.exhausted

    def _draw_launches(self, count: int, num_samples: int, *, from_waiting: bool) -> list[Launch]:
        found: list[Launch] = []
        while len(found) < count:
            if from_waiting and self._waiting:
                prompt = self._waiting.popleft()[0]
            elif not self._source.exhausted:
                prompt = next(self._source)
            elif self._waiting:
                prompt = self._waiting.popleft()[0]
            else:
                break
            found.append(Launch(prompt=prompt, num_samples=num_samples))
        return found


def _multiply_count(count: int, factor: float) -> int:
    """Returns count * factor, rounded up, but ignores floating-point error: 1.1 times 100 is 110."""
    return math.ceil(count * factor - 1e-9)
