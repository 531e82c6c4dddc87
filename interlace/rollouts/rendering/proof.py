"""Tests of the loaded chat template: whether turns can be appended without changing the existing tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from interlace.core.errors import UserError
from interlace.core.messages import Message, Messages, ToolCall, ToolSpec

Kind: TypeAlias = Literal["user", "tool"]
KINDS: tuple[Kind, ...] = ("user", "tool")
PROBE = ToolSpec(name="probe", description="d", parameters={"type": "object", "properties": {"a": {"type": "string"}}})


class TemplateText(Protocol):
    """Interface that renders text with a template."""

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompts: bool = True) -> str:
        """Renders a conversation. UserError if the template refuses it."""

    def tail_text(
        self,
        answer: Message | None,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        before: Sequence[Message] = (),
    ) -> str | None:
        """Returns the rendered text after an answer, or None if the template refuses the messages."""

    def answer(self, messages: Sequence[Message], answer: Message, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Writes an answer as tokens. UserError if the template refuses it."""

    def parse(self, token_ids: Sequence[int], *, tools: Sequence[ToolSpec] = ()) -> Message:
        """Reads an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnFinding:
    """Results of the tests of one kind of turn."""

    appends: bool
    """True if the text that a turn adds does not depend on the messages before it."""
    rewrites: bool
    """True if the turn changes the rendered text of earlier turns."""
    is_there: bool
    """True if the template accepts messages of this kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Results of the tests of a template."""

    user: TurnFinding
    tool: TurnFinding
    has_tools: bool
    """True if the template renders the tools."""
    reads_calls: bool
    """True if the parser reads a call that the template writes, or if the template cannot write one by itself."""

    def may_append(self, kind: Kind, *, branch_on_rewrite: bool) -> bool:
        """Returns whether turns of a kind are appended. branch_on_rewrite: no if earlier turns change."""
        found = self.user if kind == "user" else self.tool
        return found.appends and not (found.rewrites and branch_on_rewrite)

    def notes(self, *, branch_on_rewrite: bool) -> tuple[str, ...]:
        """Returns a sentence for calls that are not read, and for each kind of turn that is not simply appended."""
        found: list[str] = []
        if self.has_tools and not self.reads_calls:
            found.append(
                "the parser does not read the calls that this chat template writes: calls of tools are unreadable or "
                "plain text (renderer.parser)"
            )
        for kind, finding in (("user", self.user), ("tool", self.tool)):
            if not finding.is_there:
                continue
            if not finding.appends:
                found.append(
                    f"a {kind} message cannot be appended under this chat template, because its text depends on the "
                    "messages before it: the whole conversation is rendered again at each such turn, which becomes a "
                    "branch"
                )
            elif finding.rewrites and branch_on_rewrite:
                found.append(
                    f"a {kind} message makes this chat template change earlier turns: the whole conversation is "
                    "rendered again at each such turn, which becomes a branch (renderer.on_rewrite=branch)"
                )
            elif finding.rewrites:
                found.append(
                    f"a {kind} message makes this chat template change earlier turns, such as remove their thoughts; "
                    "in this run they stay as they were drawn (renderer.on_rewrite=append)"
                )
        return tuple(found)


def prove(template: TemplateText) -> Proof:
    """Tests the template on conversations of several kinds."""
    return Proof(
        user=_examine_template(template, "user"),
        tool=_examine_template(template, "tool"),
        has_tools=_has_tools(template),
        reads_calls=_reads_calls(template),
    )


def _examine_template(template: TemplateText, kind: Kind) -> TurnFinding:
    new = (
        Message(role="user", content="next")
        if kind == "user"
        else Message(role="tool", content="result", tool_call_id="000000000", name="probe")
    )
    tools = (PROBE,) if kind == "tool" else ()
    tails = [template.tail_text(None, [new], tools, before) for before in _iterate_histories()]
    found = {tail for tail in tails if tail is not None}
    return TurnFinding(
        appends=len(found) == 1 and all(found),
        rewrites=any(_rewrites_history(template, before, new, tools) for before in _iterate_histories()),
        is_there=bool(found),
    )


def _iterate_histories() -> Iterator[Messages]:
    user = Message(role="user", content="first")
    system = Message(role="system", content="be brief")
    answer = Message(role="assistant", content="one")
    call = Message(
        role="assistant", content="", tool_calls=(ToolCall(id="000000001", name="probe", arguments={"a": "b"}),)
    )
    result = Message(role="tool", content="c", tool_call_id="000000001", name="probe")
    yield (user,)
    yield (system, user)
    yield (user, answer, user)
    yield (user, call, result)


def _rewrites_history(template: TemplateText, before: Messages, new: Message, tools: tuple[ToolSpec, ...]) -> bool:
    calls = (ToolCall(id="000000000", name="probe", arguments={"a": "b"}),) if new.role == "tool" else ()
    answers = [
        Message(role="assistant", content="" if calls else "two", tool_calls=calls),
        Message(role="assistant", content="" if calls else "two", tool_calls=calls, reasoning="hm"),
        *([] if calls else [Message(role="assistant", content="<think>\nhm\n</think>\n\ntwo")]),
    ]
    for answer in answers:
        try:
            now = template.text([*before, answer], tools, prompts=False)
            later = template.text([*before, answer, new], tools)
            asked = template.text(before, tools)
        except UserError:
            continue
        # The context of the answer may end within a thought, which the template may remove later.
        if not later.startswith(now.rstrip()) or not later.startswith(asked.rstrip()):
            return True
    return False


def _has_tools(template: TemplateText) -> bool:
    asked = [Message(role="user", content="first")]
    try:
        return PROBE.name in template.text(asked, (PROBE,))
    except UserError:
        return False


def _reads_calls(template: TemplateText) -> bool:
    call = ToolCall(id="000000001", name=PROBE.name, arguments={"a": "b"})
    answer = Message(role="assistant", content="", tool_calls=(call,))
    try:
        written = template.answer([Message(role="user", content="first")], answer, (PROBE,))
    except UserError:
        return True
    try:
        found = template.parse(written, tools=(PROBE,)).tool_calls
    except Exception:  # noqa: BLE001 - a parser may be the user's, and the answers of a run may be others
        return False
    return [(each.name, dict(each.arguments)) for each in found] == [(call.name, dict(call.arguments))]
