"""The base of every configuration: frozen, typed, one default for each field, unknown keys refused by name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from interlace.core.errors import UserError, nearest

_ALTERNATIVE = re.compile(r"(literal|tuple|function-\w+)\[.*|constrained-\w+|bool|int|float|str")
"""Pydantic's name of one of the types that a field may have; stands in a mistake's place like a key, and is none."""
_WANTED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "it must be a whole number, such as 10"),
    **dict.fromkeys(("float_parsing", "float_type"), "it must be a number, such as 0.5 or 1e-4"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "it must be true or false"),
    "string_type": "it must be text",
}
"""Plain words for pydantic's messages on types, by the kind of mistake."""


class Config(BaseModel):
    """A frozen settings record. It sits beside what it configures; derived values are properties, never fields."""

    # Infinity and NaN pass bounds such as gt=0, and config.yaml would not bring them back.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, data: Any) -> Any:
        """YAML reads on, yes and true as true, which would count as 1."""
        for name, value in data.items() if isinstance(data, Mapping) else ():
            if isinstance(value, bool) and name in cls.model_fields:
                types = set(_types(cls.model_fields[name].annotation))
                if types & {int, float} and bool not in types:
                    raise ValueError(
                        f"{name} = {value}: it is a number, and YAML reads yes, no, on and off as true and false"
                    )
        return data

    @classmethod
    def parse(cls, data: Mapping[str, object], *, where: str = "") -> Self:
        """Validates `data`, naming the dotted key of the first mistake.

        where: what the data is, for the message (a recipe's path, "schedule"). Raises UserError.
        """
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise UserError(explain(cls, error, where)) from None


def explain(cls: type[BaseModel], error: ValidationError, where: str = "") -> str:
    """Writes a validation error as sentences, one a mistake: the dotted key, what was given, what is accepted."""
    prefix = f"{where}: " if where else ""
    told: dict[str, list[str]] = {}
    for detail in error.errors():
        given, reason = _told(cls, detail)
        told.setdefault(given, []).append(reason)
    return "\n".join(f"{prefix}{given}{' Or: '.join(reasons)}" for given, reasons in told.items())


def _told(cls: type[BaseModel], detail: ErrorDetails) -> tuple[str, str]:
    """Returns pairs (what was given, what is wrong with it); for a field that may be of several types, one a type."""
    *sections, last = map(str, detail["loc"] or [""])
    names_a_key = detail["type"] in ("extra_forbidden", "missing")  # whatever it is called
    ends = [last] if last and (names_a_key or not _ALTERNATIVE.fullmatch(last)) else []
    found = (*(part for part in sections if not _ALTERNATIVE.fullmatch(part)), *ends)
    if detail["type"] == "extra_forbidden":
        place, options = _place(cls, found[:-1])
        return f"unknown key {'.'.join((*place, last))!r}.", nearest(last, options)
    loc, options = _place(cls, found)
    key = ".".join(loc) or cls.__name__
    if detail["type"] == "missing":
        return f"missing key {key!r}.", ""
    # A section that contradicts itself says in which of its keys; the others would bury that.
    is_section = detail["type"] == "value_error" and isinstance(detail["input"], Mapping)
    given = key if is_section else f"{key} = {detail['input']!r:.200}"
    if detail["type"] in ("model_type", "model_attributes_type"):
        return f"{given}: ", f"Input should be a mapping, with keys of: {', '.join(sorted(options))}."
    return f"{given}: ", f"{_WANTED.get(detail['type']) or detail['msg'].removeprefix('Value error, ')}."


def _place(cls: type[BaseModel], parts: Sequence[str]) -> tuple[tuple[str, ...], Sequence[str]]:
    """A mistake's place as its keys, without the kind that pydantic adds of a section of several, and the keys there.

    parts: what pydantic calls the place.
    """
    keys: list[str] = []
    here = [cls]
    for part in parts:
        of_kind = [one for one in here if any(field.default == part for field in one.model_fields.values())]
        if part not in _fields(here) and of_kind and len(here) > 1:
            here = of_kind
            continue
        keys.append(part)
        annotations = [one.model_fields[part].annotation for one in here if part in one.model_fields]
        here = [one for annotation in annotations for one in _types(annotation) if _is_section(one)]
    return tuple(keys), _fields(here)


def _fields(sections: Sequence[type[BaseModel]]) -> list[str]:
    return list(dict.fromkeys(name for one in sections for name in one.model_fields))


def _is_section(one: Any) -> bool:
    return isinstance(one, type) and issubclass(one, BaseModel)


def _types(annotation: Any) -> Iterator[Any]:
    """Yields all types that a field may have."""
    yield annotation
    for arg in get_args(annotation):
        yield from _types(arg)
