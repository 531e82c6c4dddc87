"""Tools for chat templates without tools: described in the system message, called and answered in plain text."""

import json
from collections.abc import Sequence
from dataclasses import replace

from interlace.core.messages import Message, Messages, ToolCall, ToolSpec, tool_mapping

HEAD = (
    "You may call functions to answer. They are described within <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    'To call one, write its name and arguments as JSON:\n<tool_call>\n{{"name": NAME, "arguments": ARGUMENTS}}\n'
    "</tool_call>"
)


def write_out_tools(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Messages:
    """Returns the conversation with its tools, calls and tool messages written as text in Hermes' format."""
    found = [_write_calls(message) for message in messages]
    if tools:
        lines = [json.dumps(tool_mapping(tool), ensure_ascii=False, default=dict) for tool in tools]
        head = HEAD.format(tools="\n".join(lines))
        if found and found[0].role == "system":
            found[0] = replace(found[0], content=f"{found[0].content}\n\n{head}")
        else:
            found.insert(0, Message(role="system", content=head))
    return tuple(_join_messages(found))


def _write_calls(message: Message) -> Message:
    if message.role == "tool":
        return Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [f"<tool_call>\n{_call_text(call)}\n</tool_call>" for call in message.tool_calls]
    return replace(message, content="\n".join([part for part in (message.content, *calls) if part]), tool_calls=())


def _call_text(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False, default=dict)


def _join_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Joins consecutive messages of the user, because templates require alternating roles."""
    found: list[Message] = []
    for message in messages:
        if found and message.role == found[-1].role == "user":
            found[-1] = replace(found[-1], content=f"{found[-1].content}\n{message.content}")
        else:
            found.append(message)
    return found
