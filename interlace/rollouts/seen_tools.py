"""Tracking of tool calls in messages: one turn makes a call, and the context of a later turn contains the answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.rollouts.base import ToolUse


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


class SeenTools:
    """Tool calls of one session. The time of a call is from the end of its turn to the request with its answer.

    Answers of tools are not interpreted, so only calls that could not be read, or that name no tool, count as failed.
    """

    def __init__(self) -> None:
        self.uses: list[ToolUse] = []
        """Answered calls, in the order of their answers."""
        self._pending: list[_Pending] = []

    def drawn(self, turn: int, answer: Message, tools: Sequence[ToolSpec], now_s: float) -> None:
        """Records the calls of a turn. turn: its number. tools: tools in the prompt of the turn."""
        if answer.tool_calls:
            self._pending.append(_Pending(turn, answer.tool_calls, frozenset(tool.name for tool in tools), now_s))

    def asked(self, messages: Sequence[Message] | None, now_s: float) -> None:
        """Records the request of a turn. messages: its context; None if the context is token ids."""
        if not self._pending:
            return
        answered = [each for each in self._pending if each.is_answered_by(messages)]
        self._pending = [each for each in self._pending if each not in answered]
        for each in answered:
            for call in each.calls:
                is_known = not call.error and (call.name in each.names or not each.names)
                name = call.name if is_known else ""
                self.uses.append(ToolUse(name=name, seconds=now_s - each.since_s, failed=not is_known, turn=each.turn))
