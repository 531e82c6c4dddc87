"""Record of one session: its turns, their rewards, and its calls of tools."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.rewards.config import LARGEST
from interlace.rollouts.base import ToolUse, Turn


@dataclass(frozen=True, slots=True)
class _Pending:
    turn: int
    calls: tuple[ToolCall, ...]
    names: frozenset[str]
    """Tools in the prompt of the turn."""
    since_s: float
    """Time of the end of the turn, in seconds."""

    def is_answered_by(self, messages: Sequence[Message] | None) -> bool:
        """Returns whether a context contains an answer to one of the calls. None, for token ids, counts as True."""
        ids = {call.id for call in self.calls}
        return messages is None or any(each.role == "tool" and each.tool_call_id in ids for each in messages)


def read_reward(value: object, what: str) -> float:
    """Returns a number that an episode gave, such as its reward. what: words for it.

    Raises ValueError unless it is finite as float32, in which advantages are computed.
    """
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]  # of any type
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST:  # nor is a NaN
        raise ValueError(f"{what} is {value!r:.80}, not a finite number (float32)")
    return number


class TurnRecord:
    """Numbers and stores the turns of one session, with rewards and calls of tools.

    The time of a call that is seen in messages is from the end of its turn to the request with its answer. Answers of
    tools are not interpreted, so only calls that could not be read, or that name no tool, count as failed.
    """

    def __init__(self, max_turns: int | None) -> None:
        """max_turns: largest number of turns; None for no limit."""
        self._max_turns = max_turns
        self._turns: dict[int, Turn | None] = {}
        """Turns by number; None for a turn in progress."""
        self._largest = -1
        """Largest of these numbers; -1 without turns."""
        self._num_withdrawn = Counter[int]()
        self.rewards: dict[int, float] = {}
        """Rewards by the number of the turn, without turns that have none."""
        self._reported: list[ToolUse] = []
        self._seen: list[ToolUse] = []
        """Calls in messages that were answered, in the order of their answers."""
        self._pending: list[_Pending] = []

    @property
    def turns(self) -> list[Turn]:
        return [turn for _, turn in sorted(self._turns.items()) if turn]

    @property
    def tool_uses(self) -> Sequence[ToolUse]:
        """Calls of tools in the order of their ends: the reported calls, or else the calls seen in messages."""
        return self._reported or self._seen

    @property
    def next_number(self) -> int:
        return self._largest + 1

    def reserve(self, number: int | None) -> int:
        """Reserves the number of a turn, or the next one if None. Returns it. UserError if the turn is not allowed."""
        place = self.next_number if number is None else number
        if place < 0 or place in self._turns:
            raise UserError(f"turn {place} was requested before. Give each call a separate number.")
        if self._max_turns is not None and len(self._turns) >= self._max_turns:
            raise UserError(f"the episode asked for more than {self._max_turns} turns (episode.max_turns)")
        self._turns[place], self._largest = None, max(self._largest, place)
        return place

    def free(self, number: int) -> None:
        del self._turns[number]
        self._largest = max(self._turns, default=-1)

    def withdraw(self, number: int) -> None:
        """Removes a turn that is withdrawn, with its reward and the calls of its answer, if it has them. UserError if
        there is no such turn.
        """
        if number not in self._turns:
            raise UserError(f"turn {number} is withdrawn, and the episode has no such turn: withdraw a turn once.")
        self.free(number)
        self.rewards.pop(number, None)
        self._pending = [each for each in self._pending if each.turn != number]
        self._num_withdrawn[number] += 1

    def num_withdrawn(self, number: int) -> int:
        return self._num_withdrawn[number]

    def request(self, messages: Sequence[Message] | None, now_s: float) -> None:
        """Records the request of a turn. messages: its context; None if the context is token ids."""
        answered = [each for each in self._pending if each.is_answered_by(messages)]
        self._pending = [each for each in self._pending if each not in answered]
        for each in answered:
            for call in each.calls:
                is_known = not call.error and (call.name in each.names or not each.names)
                name = call.name if is_known else ""
                self._seen.append(ToolUse(name=name, seconds=now_s - each.since_s, failed=not is_known, turn=each.turn))

    def add(self, turn: Turn, tools: Sequence[ToolSpec], now_s: float) -> None:
        """Stores a finished turn. tools: tools in its prompt."""
        self._turns[turn.number] = turn
        if calls := turn.message.tool_calls:
            self._pending.append(_Pending(turn.number, calls, frozenset(tool.name for tool in tools), now_s))

    def reward(self, number: int, value: float) -> None:
        """Adds a reward to a turn. ValueError unless it is a finite float32 number."""
        self.rewards[number] = self.rewards.get(number, 0.0) + read_reward(value, f"the reward of turn {number}")

    def add_tool_use(self, use: ToolUse) -> None:
        """Stores a call of a tool that the episode reported."""
        self._reported.append(use)
