"""Messages of a conversation, the calls in them, and the tools that can be called."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from interlace.core.errors import UserError
from interlace.core.types import JSON

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that the model asked for."""

    id: str = ""
    """Nine letters and digits, which every chat template takes; unique in its conversation."""
    name: str
    """Name of the tool; empty where the call could not be read so far."""
    arguments: Mapping[str, JSON] = field(default_factory=dict)
    error: str = ""
    """Reason why the call could not be read, written for the model; empty where it could."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    reasoning: str | None = None
    """Thoughts before the content, where the model's format marks them."""
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
    """A tool, as the model is shown it."""

    name: str
    description: str = ""
    parameters: Mapping[str, JSON] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments, an object."""

    @property
    def properties(self) -> Mapping[str, JSON]:
        """Schemas of the arguments, by name."""
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def definitions(self) -> Mapping[str, JSON]:
        """Schemas that a `$ref` in the arguments' schemas names."""
        found = self.parameters.get("$defs", self.parameters.get("definitions"))
        return found if isinstance(found, Mapping) else {}


def as_message(value: "JSON | Message", where: str = "message") -> Message:
    """Reads a message that may be written as a mapping, in OpenAI's form. Raises UserError for what is none."""
    if isinstance(value, Message):
        return value
    is_whole = isinstance(value, Mapping) and "role" in value and ("content" in value or "tool_calls" in value)
    if not isinstance(value, Mapping) or not is_whole:
        raise UserError(f"{where} is {value!r:.80}: write {{role: user, content: text}}, of roles {', '.join(ROLES)}.")
    role, content = value["role"], value.get("content")
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
        reasoning=_text(value.get("reasoning", value.get("reasoning_content"))),
        tool_calls=tuple(_as_call(call, where) for call in calls),
        tool_call_id=_text(value.get("tool_call_id")),
        name=_text(value.get("name")),
    )


def _text(value: JSON) -> str | None:
    return value if isinstance(value, str) else None


def _as_call(value: JSON, where: str) -> ToolCall:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise UserError(f"{where} has the tool call {value!r:.80}: write {{function: {{name: ..., arguments: ...}}}}.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = read_arguments(arguments, where)
    if not isinstance(arguments, Mapping):
        raise UserError(f"{where} has a tool call whose arguments are {arguments!r:.80}: they must be an object.")
    return ToolCall(id=_text(value.get("id")) or "", name=name, arguments=arguments)


def read_arguments(text: str, where: str) -> Mapping[str, JSON]:
    """Reads the arguments of a call from their JSON text. Raises UserError where they are no object."""
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} has a tool call whose arguments are no JSON: {error}.") from None
    if not isinstance(found, dict):
        raise UserError(f"{where} has a tool call whose arguments are {text!r:.80}: they must be an object.")
    return found


def as_tool(value: "JSON | ToolSpec", where: str = "tool") -> ToolSpec:
    """Reads a tool that may be written as a mapping, in OpenAI's form. Raises UserError for what is none."""
    if isinstance(value, ToolSpec):
        return value
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} is {value!r:.80}: write {{name: ..., description: ..., parameters: JSON schema}}.")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise UserError(f"{where} {function['name']!r} has parameters {parameters!r:.80}: they are a JSON schema.")
    return ToolSpec(
        name=str(function["name"]), description=_text(function.get("description")) or "", parameters=parameters
    )


def to_mapping(message: Message, *, as_text: bool = False) -> dict[str, JSON]:
    """Writes a message in OpenAI's form, with each call's arguments as an object, which most chat templates read.

    as_text: the arguments as JSON text.
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
    """Says whether two messages are the same for the model.

    A client may have lost the reasoning and the spaces around a content, and calls may have other ids.
    """
    if (one.role, one.content.strip(), one.tool_call_id if one.role == "tool" else None) != (
        other.role,
        other.content.strip(),
        other.tool_call_id if other.role == "tool" else None,
    ):
        return False
    if one.reasoning and other.reasoning and one.reasoning.strip() != other.reasoning.strip():
        return False
    return [(call.name, dict(call.arguments)) for call in one.tool_calls] == [
        (call.name, dict(call.arguments)) for call in other.tool_calls
    ]
