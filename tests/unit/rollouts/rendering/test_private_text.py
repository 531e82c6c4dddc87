"""Texts and other conversations change nothing in the rendered text of a conversation."""

from dataclasses import replace

import pytest

from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolCall
from interlace.data import chat_template_limits
from tests.support.conversations import TOOLS
from tests.unit.rollouts.rendering.test_renderer import renderer_of


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_private_character_in_a_message_removes_no_part_of_it(role: str) -> None:
    """A tool result with U+E002, an icon of web fonts, was appended without its beginning and the head of its turn."""
    renderer = renderer_of("qwen2_5")
    said = [Message(role="user", content="What?")]
    ids = renderer.render(said, TOOLS)
    drawn = renderer._text.encode('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>')
    answer = renderer.parse(drawn, prompt_ids=ids, tools=TOOLS)
    new = [Message(role=role, content="a \ue002 b \ue003 c", tool_call_id=answer.tool_calls[0].id)]
    assert renderer.extend([*ids, *drawn], answer, new, TOOLS) == renderer.render([*said, answer, *new], TOOLS)
    letters = "".join(map(chr, range(0xE000, 0xF900)))
    assert renderer.extend([*ids, *drawn], answer, [replace(new[0], content=letters)], TOOLS) is None


def test_a_refused_conversation_changes_no_call_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a template was tried with arguments as JSON text, another thread wrote its arguments as text too."""
    renderer, seen = renderer_of("qwen2_5"), list[str]()
    call = ToolCall(id="000000001", name="now", arguments={"a": 1})
    said = [Message(role="user", content="x"), Message(role="assistant", content="", tool_calls=(call,))]
    expected, render = renderer.text(said, TOOLS), chat_template_limits.render_chat

    def refuse(tokenizer: object, messages: list[dict], **options: object) -> str:
        if messages[0]["content"] != "refused":
            return render(tokenizer, messages, **options)
        seen.append(renderer.text(said, TOOLS))
        raise chat_template_limits.ChatTemplateError("no")

    monkeypatch.setattr(chat_template_limits, "render_chat", refuse)
    with pytest.raises(UserError, match="cannot be applied"):
        renderer.text([Message(role="user", content="refused"), said[1]], TOOLS)
    assert seen == [expected, expected]
