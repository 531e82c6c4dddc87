"""Base class of the parsers, and shared functions."""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from interlace.core.messages import ToolCall, ToolSpec
from interlace.core.types import JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedText:
    """An answer's text, in which each tag that is one token of the vocabulary is replaced by a private character.

    A tag counts only if the model sampled its token. The same letters in several tokens are text.
    """

    text: str
    marks: Mapping[str, str]
    """Character of each tag that is one token. Any other tag is found by its letters."""

    def tag(self, tag: str) -> str:
        """Returns the text that stands for a tag."""
        return self.marks.get(tag, tag)

    def plain(self, text: str) -> str:
        """Returns a part of the text with the letters of all tags."""
        for tag, mark in self.marks.items():
            text = text.replace(mark, tag)
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """Contents of an answer."""

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    """Calls in order, without ids. A call that could not be read has an error."""


class Parser(ABC):
    """Reader of one format. A built-in module has one subclass."""

    tags: ClassVar[tuple[str, ...]] = ()
    """Tags of the format."""
    thoughts: ClassVar[tuple[str, str] | None] = None
    """Tags around reasoning; None if the format has none."""
    begins: ClassVar[tuple[str, ...] | None] = None
    """Tags with which calls begin; None if they are unknown."""
    signs: ClassVar[tuple[str, ...]] = ()
    """Texts that every chat template of this format contains. If empty, the parser is found by name only."""

    @abstractmethod
    def parse(self, answer: MarkedText, tools: Sequence[ToolSpec], *, in_thought: bool = False) -> Parsed:
        """Reads an answer without its end-of-turn tokens. in_thought: its context ended within the reasoning."""

    def call_tags(self, tools: Sequence[ToolSpec]) -> Sequence[str] | None:
        """Returns the tags with which calls begin; by default `begins`."""
        del tools
        return self.begins

    def begun(self, answer: MarkedText, tools: Sequence[ToolSpec], *, in_thought: bool = False) -> Parsed:
        """Reads an incomplete answer: the text before its first call, without a possible beginning of a tag."""
        tags = self.call_tags(tools)
        if tags is None:
            return Parsed(content="")
        begins = [answer.tag(tag) for tag in tags]
        first = min((place for tag in begins if (place := answer.text.find(tag)) >= 0), default=len(answer.text))
        text = answer.text[:first]
        if first == len(answer.text):
            text = text[: len(text) - open_end(text, [*begins, *map(answer.tag, self.thoughts or ())])]
        found = self.parse(replace(answer, text=text), tools, in_thought=in_thought)
        return replace(found, calls=())


def open_end(text: str, tags: Sequence[str]) -> int:
    """Returns the number of characters at the end of a text that may be the beginning of a tag."""
    return max((_find_open_size(text, tag) for tag in tags), default=0)


def _find_open_size(text: str, tag: str) -> int:
    place = max(0, len(text) - len(tag) + 1)
    while (place := text.find(tag[:1], place)) >= 0:
        size = len(text) - place
        if tag[size - 1] == text[-1] and tag.startswith(text[place:]):
            return size
        place += 1
    return 0


def split_thought(answer: MarkedText, tags: tuple[str, str], *, in_thought: bool) -> tuple[str | None, str]:
    """Returns the reasoning, or None, and the text after it. Reasoning without an end tag is the whole text."""
    begin, end = answer.tag(tags[0]), answer.tag(tags[1])
    text = answer.text.lstrip()
    if text.startswith(begin):
        text = text[len(begin) :]
    elif not in_thought:
        return None, answer.text
    thought, _, rest = text.partition(end)
    return answer.plain(thought).strip("\n"), rest


def json_call(body: str) -> ToolCall:
    """Reads `{"name": ..., "arguments": {...}}`. `parameters` is a synonym of `arguments`."""
    try:
        found = read_json(body)
    except (ValueError, RecursionError) as error:
        return ToolCall(name="", error=f"The call is not valid JSON: {error}.")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return ToolCall(name="", error='The call is not of the form {"name": ..., "arguments": {...}}.')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return ToolCall(name=found["name"], error="The arguments of the call are not a JSON object.")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(name=found["name"], error="The arguments of the call are not a JSON object.")
    return ToolCall(name=found["name"], arguments=arguments)


def read_json(text: str) -> JSON:
    """Reads the JSON of a call. U+FFFD replaces each half of a character, which no tokenizer accepts.

    Raises ValueError for text that is not JSON, also for NaN and Infinity, which Python reads and other clients do not.
    """
    found: JSON = json.loads(text, parse_float=_read_finite, parse_constant=_read_finite)
    return _replace_halves(found) if _HALF.search(text) else found


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""JSON's escape of half of a character."""


def _read_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _replace_halves(value: JSON) -> JSON:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {str(_replace_halves(key)): _replace_halves(item) for key, item in value.items()}
    return [_replace_halves(item) for item in value] if isinstance(value, list) else value


def read_argument(text: str, schema: JSON, definitions: Mapping[str, JSON]) -> JSON:
    """Reads an argument that is written as bare text, by its JSON schema; returns the text if the schema allows text.

    definitions: schemas that a `$ref` names. Of several possible types, a type other than text is tried first only if
    it is null, or if text is not possible.
    """
    kinds = _list_types(schema, definitions)
    bare = text.strip()
    if "null" in kinds and bare.lower() in ("null", "none"):
        return None
    if "string" in kinds or not kinds:
        return text
    if "boolean" in kinds and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    try:
        return read_json(bare)
    except (ValueError, RecursionError):
        return text


_MOST_REFERENCES = 100
"""Schemas that are looked at for one argument: a schema may refer to itself."""


def _list_types(schema: JSON, definitions: Mapping[str, JSON]) -> set[str]:
    """Returns the JSON types that a schema allows; empty if it names none."""
    found: set[str] = set()
    open_schemas, num_seen = [schema], 0
    while open_schemas and num_seen < _MOST_REFERENCES:
        one, num_seen = open_schemas.pop(), num_seen + 1
        if not isinstance(one, Mapping):
            continue
        kind = one.get("type")
        named = [kind] if isinstance(kind, str) else kind if isinstance(kind, Sequence) else ()
        found |= {each for each in named if isinstance(each, str)}
        values = [one["const"]] if "const" in one else one.get("enum")
        if kind is None and isinstance(values, Sequence) and not isinstance(values, str):
            found |= {_NAMES[type(value)] for value in values if type(value) in _NAMES}
        for key in ("anyOf", "oneOf", "allOf"):
            parts = one.get(key)
            open_schemas += parts if isinstance(parts, list | tuple) else []
        reference = one.get("$ref")
        if isinstance(reference, str):
            open_schemas.append(definitions.get(reference.rpartition("/")[2]))
    return found


_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
"""JSON type of a Python value."""


def between(text: str, begin: str, end: str) -> list[tuple[str, bool, tuple[int, int]]]:
    """Lists the texts between two tags: the text, whether its end tag exists, and its span with the tags."""
    matches = re.finditer(re.escape(begin) + f"(.*?)(?:({re.escape(end)})|$)", text, re.DOTALL)
    return [(match[1], match[2] is not None, match.span()) for match in matches]


def without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Returns a text without some of its parts and without spaces at its ends."""
    kept, place = [], 0
    for start, end in spans:
        kept.append(text[place:start])
        place = end
    return "".join([*kept, text[place:]]).strip()
