"""Base class of all configurations: frozen and typed, with one default per field. Unknown keys raise an error."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from interlace.core.errors import UserError, close_names, nearest

_ALTERNATIVE = re.compile(r"(literal|tuple|function-\w+)\[.*|constrained-\w+|bool|int|float|str")
"""Pydantic's name of one of the types of a field. It appears among the keys in the location of a mistake."""
_WANTED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "it must be a whole number, such as 10"),
    **dict.fromkeys(("float_parsing", "float_type"), "it must be a number, such as 0.5 or 1e-4"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "it must be true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "it must be a list in brackets, such as [a, b]"),
    **dict.fromkeys(("dict_type", "mapping_type"), "it must be a mapping, such as {{key: value}}"),
    "string_type": "it must be text",
    "none_required": "it must be null",
    "finite_number": "it must be a finite number",
    "int_parsing_size": "it must be a whole number with fewer digits",
    "greater_than": "it must be more than {gt}",
    "greater_than_equal": "it must be {ge} or more",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be {le} or less",
    "literal_error": "it must be {expected}",
    "enum": "it must be {expected}",
    "too_short": "it must have {min_length} or more items",
    "too_long": "it must have {max_length} items or fewer",
    "string_too_short": "it must have {min_length} or more letters",
    "string_too_long": "it must have {max_length} letters or fewer",
}
"""Plain words for pydantic's messages, by the kind of mistake; braces name entries of the mistake's context."""
_LISTED = 8
"""Maximum number of keys of a section that a message lists."""


class Config(BaseModel):
    """A frozen record of settings, stored with the part that it configures. Derived values are properties."""

    # Forbidden because infinity passes bounds such as gt=0, and config.yaml cannot store infinity and NaN.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, data: Any) -> Any:
        """Refuses true for a number: YAML reads on, yes and true as true, which Python counts as 1."""
        for name, value in data.items() if isinstance(data, Mapping) else ():
            if isinstance(value, bool) and name in cls.model_fields:
                types = set(_iterate_types(cls.model_fields[name].annotation))
                if types & {int, float} and bool not in types:
                    raise ValueError(
                        f"{name} = {value}: it is a number, and YAML reads yes, no, on and off as true and false"
                    )
        return data

    @classmethod
    def parse(cls, data: Mapping[str, object], *, where: str = "") -> Self:
        """Validates `data`. Raises UserError with the dotted keys of the mistakes.

        where: origin of the data, for the message (a recipe's path, "schedule").
        """
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise UserError(explain(cls, error, where)) from None

    @classmethod
    def advice(cls, key: str) -> str | None:  # noqa: ARG003 - for subclasses
        """Returns the setting to write instead of an unknown key, in sentences; None if nothing is known of the key."""
        return None


def explain(cls: type[BaseModel], error: ValidationError, where: str = "") -> str:
    """Writes a validation error as sentences, one for each mistake: dotted key, value, and accepted values."""
    prefix = f"{where}: " if where else ""
    mistakes: dict[str, list[str]] = {}
    for detail in error.errors():
        given, reason = _explain_mistake(cls, detail)
        mistakes.setdefault(given, []).append(reason)
    return "\n".join(f"{prefix}{given}{' Or: '.join(dict.fromkeys(reasons))}" for given, reasons in mistakes.items())


def _explain_mistake(cls: type[BaseModel], detail: ErrorDetails) -> tuple[str, str]:
    """Returns a pair: the key with its value, and the reason. A field of several types has one pair for each type."""
    *sections, last = map(str, detail["loc"] or [""])
    names_a_key = detail["type"] in ("extra_forbidden", "missing")  # also if the key looks like a type
    ends = [last] if last and (names_a_key or not _ALTERNATIVE.fullmatch(last)) else []
    found = (*(part for part in sections if not _ALTERNATIVE.fullmatch(part)), *ends)
    if detail["type"] == "extra_forbidden":
        place, options = _find_place(cls, found[:-1])
        given = f"unknown key {'.'.join((*place, last))!r}."
        advice = cls.advice(last) if issubclass(cls, Config) and last not in options else None
        return given, f" {advice}" if advice else nearest(last, options)
    loc, options = _find_place(cls, found)
    key = ".".join(loc)
    if detail["type"] == "missing":
        return f"missing key {key!r}.", ""
    # If a section contradicts itself, its message names the keys; the whole section would hide them.
    is_section = detail["type"] == "value_error" and isinstance(detail["input"], Mapping)
    given = (
        key if is_section else f"{key} = {_shorten_value(detail['input'])}" if key else _shorten_value(detail["input"])
    )
    if detail["type"] in ("model_type", "model_attributes_type"):
        return f"{given}: ", _section_form(key, options)
    message = _describe_condition(detail)
    return (f"{given}: " if given else ""), f"{message}."


def _describe_condition(detail: ErrorDetails) -> str:
    """Returns the condition that a value does not meet, in plain words."""
    words = _WANTED.get(detail["type"])
    if words is None:
        return detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")
    context = {name: _format_number(value) for name, value in detail.get("ctx", {}).items()}
    text = words.format(**context)
    if detail["type"] == "literal_error" and isinstance(detail["input"], str):
        close = close_names(detail["input"], re.findall(r"'([^']*)'", context["expected"]))
        text += f" (did you mean {close[0]!r}?)" if close else ""
    return text


def _format_number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shorten_value(value: object) -> str:
    """Returns a value as a message shows it: on one line, at most 200 letters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def _section_form(key: str, options: Sequence[str]) -> str:
    """Returns how a section is written, by the example of its first key."""
    listed = ", ".join(options[:_LISTED]) + (f" and {len(options) - _LISTED} others" if len(options) > _LISTED else "")
    first = f"{key}.{options[0]}=..." if options else f"{key}={{}}"
    return f"it has settings, so write {first}; its settings are {listed}."


def _find_place(cls: type[BaseModel], parts: Sequence[str]) -> tuple[tuple[str, ...], Sequence[str]]:
    """Returns the keys of a mistake's place, and the keys that its section has.

    parts: pydantic's location of the mistake. It contains the kind of a section that may be of several kinds, which
    is not a key.
    """
    keys: list[str] = []
    here = [cls]
    for part in parts:
        of_kind = [one for one in here if any(field.default == part for field in one.model_fields.values())]
        if part not in _list_fields(here) and of_kind and len(here) > 1:
            here = of_kind
            continue
        keys.append(part)
        if part not in _list_fields(here):  # an item of a list or a mapping
            continue
        annotations = [one.model_fields[part].annotation for one in here if part in one.model_fields]
        here = [one for annotation in annotations for one in _iterate_types(annotation) if _is_section(one)]
    return tuple(keys), _list_fields(here)


def _list_fields(sections: Sequence[type[BaseModel]]) -> list[str]:
    return list(dict.fromkeys(name for one in sections for name in one.model_fields))


def _is_section(one: Any) -> bool:
    return isinstance(one, type) and issubclass(one, BaseModel)


def _iterate_types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for arg in get_args(annotation):
        yield from _iterate_types(arg)
