"""Calls of tools that a session sees: asked for by one turn, answered in the context of a later one."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.rollouts.base import ToolUse


@dataclass(frozen=True, slots=True)
class _Pending:
    calls: tuple[ToolCall, ...]
    names: frozenset[str]
    """Tools that the turn was shown."""
    since_s: float
    """End of the turn."""

    def is_answered_by(self, messages: Sequence[Message] | None) -> bool:
        """Says whether a context has the answer of a tool to one of the calls; one of token ids goes on behind any."""
        ids = {call.id for call in self.calls}
        return messages is None or any(each.role == "tool" and each.tool_call_id in ids for each in messages)


class SeenTools:
    """Calls of one session. A call takes from the end of its turn to the request that brings its answer.

    What tools say is for the model alone, so that only a call that could not be read, or names no tool, counts as
    failed.
    """

    def __init__(self) -> None:
        self.uses: list[ToolUse] = []
        """Calls that were answered, in the order in which their answers came."""
        self._pending: list[_Pending] = []

    def drawn(self, answer: Message, tools: Sequence[ToolSpec], now_s: float) -> None:
        """Notes what a turn asked for. tools: that it was shown."""
        if answer.tool_calls:
            self._pending.append(_Pending(answer.tool_calls, frozenset(tool.name for tool in tools), now_s))

    def asked(self, messages: Sequence[Message] | None, now_s: float) -> None:
        """Notes that a turn is asked for. messages: its context; None where that is token ids."""
        if not self._pending:
            return
        answered = [each for each in self._pending if each.is_answered_by(messages)]
        self._pending = [each for each in self._pending if each not in answered]
        for each in answered:
            for call in each.calls:
                is_known = not call.error and (call.name in each.names or not each.names)
                name = call.name if is_known else ""
                self.uses.append(ToolUse(name=name, seconds=now_s - each.since_s, failed=not is_known))
