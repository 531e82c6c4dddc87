"""Messages of a conversation, calls of tools in them, and descriptions of tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from interlace.core.aliases import JSON
from interlace.core.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
_SAME_ROLE = {"developer": "system"}
"""Other names of a role."""
_THOUGHTS = ("reasoning", "reasoning_content", "thinking")
"""Names of the thoughts of a message. In a table that has several of them, all but one are null."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str = ""
    """Nine letters and digits, which every chat template accepts; unique in its conversation."""
    name: str
    """Name of the tool; empty if the call could not be read up to it."""
    arguments: Mapping[str, JSON] = field(default_factory=dict)
    error: str = ""
    """Reason why the call could not be read, written for the model; empty if it could."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    reasoning: str | None = None
    """Text of the thoughts before the content, if the model's format marks them."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant's message."""
    tool_call_id: str | None = None
    """Call that a tool's message answers."""
    name: str | None = None
    """Name of the tool that a tool's message is from."""


Messages: TypeAlias = tuple[Message, ...]
"""A conversation in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """Description of a tool for the model."""

    name: str
    description: str = ""
    parameters: Mapping[str, JSON] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments, an object."""

    @property
    def properties(self) -> Mapping[str, JSON]:
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def definitions(self) -> Mapping[str, JSON]:
        """Schemas that a `$ref` in the arguments' schemas names."""
        found = self.parameters.get("$defs", self.parameters.get("definitions"))
        return found if isinstance(found, Mapping) else {}


def as_message(value: "JSON | Message", where: str = "message") -> Message:
    """Reads a message that may be a mapping in OpenAI's form. Raises UserError for another value.

    The role `developer` becomes `system`; text parts of a content are joined.
    """
    if isinstance(value, Message):
        return value
    is_whole = isinstance(value, Mapping) and "role" in value and ("content" in value or "tool_calls" in value)
    if not isinstance(value, Mapping) or not is_whole:
        raise UserError(f"{where} is {value!r:.80}: write {{role: user, content: text}}, of roles {', '.join(ROLES)}.")
    role, content = value["role"], _join_content(value.get("content"), where)
    role = _SAME_ROLE.get(str(role), role)
    if role not in ROLES:
        raise UserError(f"{where} has the role {role!r}; the roles are {', '.join(ROLES)}.")
    calls = value.get("tool_calls") or ()
    if content is None and (calls or role == "assistant"):
        content = ""
    if not isinstance(content, str):
        raise UserError(f"{where} has a content of type {type(content).__name__}, it must be text.")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise UserError(f"{where} has tool_calls of type {type(calls).__name__}, it must be a list.")
    return Message(
        role=str(role),
        content=content,
        reasoning=next((text for name in _THOUGHTS if (text := _text(value.get(name))) is not None), None),
        tool_calls=tuple(_as_call(call, where) for call in calls),
        tool_call_id=_text(value.get("tool_call_id")),
        name=_text(value.get("name")),
    )


def _join_content(content: JSON, where: str) -> JSON:
    """Returns a content, its text parts joined. Raises UserError for a part of another kind."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
        if not isinstance(text, str):
            raise UserError(f"{where} has a part of type {kind!r} in its content: only text can be read.")
        texts.append(text)
    return "".join(texts)


def _text(value: JSON) -> str | None:
    return value if isinstance(value, str) else None


def _as_call(value: JSON, where: str) -> ToolCall:
    function = (value.get("function") or value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise UserError(f"{where} has the tool call {value!r:.80}: write {{function: {{name: ..., arguments: ...}}}}.")
    arguments = function.get("arguments")
    if arguments is None:  # a call without arguments
        arguments = {}
    if isinstance(arguments, str):
        arguments = read_arguments(arguments, where)
    if not isinstance(arguments, Mapping):
        raise UserError(f"{where} has a tool call whose arguments are {arguments!r:.80}: they must be an object.")
    return ToolCall(id=_text(value.get("id")) or "", name=name, arguments=arguments)


def read_arguments(text: str, where: str) -> Mapping[str, JSON]:
    """Reads the arguments of a call from their JSON text. Raises UserError if they are not an object."""
    try:
        found = json.loads(text) if text.strip() else {}
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # ValueError for half of a character, which has no tokens
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} has a tool call whose arguments are not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise UserError(f"{where} has a tool call whose arguments are {text!r:.80}: they must be an object.")
    return found


def as_tool(value: "JSON | ToolSpec", where: str = "tool") -> ToolSpec:
    """Reads a tool that may be a mapping in OpenAI's form. Raises UserError for another value."""
    if isinstance(value, ToolSpec):
        return value
    function = (value.get("function") or value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} is {value!r:.80}: write {{name: ..., description: ..., parameters: JSON schema}}.")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise UserError(f"{where} {function['name']!r} has parameters {parameters!r:.80}: they are a JSON schema.")
    return ToolSpec(
        name=str(function["name"]), description=_text(function.get("description")) or "", parameters=parameters
    )


def to_mapping(message: Message, *, as_text: bool = False) -> dict[str, JSON]:
    """Writes a message in OpenAI's form. Arguments of calls are objects, as most chat templates read them.

    as_text: writes the arguments as JSON text.
    """

    def arguments(call: ToolCall) -> JSON:
        return json.dumps(call.arguments, ensure_ascii=False, default=dict) if as_text else call.arguments

    found: dict[str, JSON] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found


def tool_mapping(tool: ToolSpec) -> dict[str, JSON]:
    """Writes a tool in OpenAI's form."""
    about: dict[str, JSON] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": about}


def same_message(one: Message, other: Message) -> bool:
    """Returns whether two messages are the same for the model.

    They may differ in the reasoning and in spaces around a content, which clients lose, and in the ids of calls.
    """
    if one.reasoning and other.reasoning and one.reasoning.strip() != other.reasoning.strip():
        return False
    return _find_meaning(one) == _find_meaning(other)


def _find_meaning(message: Message) -> tuple[object, ...]:
    """Returns the parts of a message that the model reads and that no client loses."""
    calls = [(call.name, dict(call.arguments)) for call in message.tool_calls]
    return message.role, message.content.strip(), message.tool_call_id if message.role == "tool" else None, calls
