"""The base of every configuration: frozen, typed, one default for each field, unknown keys refused by name."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from interlace.core.errors import UserError, nearest

_ALTERNATIVE = re.compile(r"(literal|tuple|function-\w+)\[.*|constrained-\w+|bool|int|float|str")
"""What pydantic calls one of the types that a field may have; stands in a mistake's place like a key, and is none."""


class Config(BaseModel):
    """A frozen settings record. It sits beside what it configures; derived values are properties, never fields."""

    # Infinity and NaN pass bounds such as gt=0, and config.yaml would not bring them back.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

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
    """A validation error as sentences, one a mistake: the dotted key, what was given, what is accepted."""
    prefix = f"{where}: " if where else ""
    told: dict[str, list[str]] = {}
    for detail in error.errors():
        given, reason = _told(cls, detail)
        told.setdefault(given, []).append(reason)
    return "\n".join(f"{prefix}{given}{' Or: '.join(reasons)}" for given, reasons in told.items())


def _told(cls: type[BaseModel], detail: ErrorDetails) -> tuple[str, str]:
    """(what was given, what is wrong with it); of a field that may be of several types, one a type."""
    *sections, last = map(str, detail["loc"] or [""])
    names_a_key = detail["type"] in ("extra_forbidden", "missing")  # whatever it is called
    ends = [last] if last and (names_a_key or not _ALTERNATIVE.fullmatch(last)) else []
    loc = (*(part for part in sections if not _ALTERNATIVE.fullmatch(part)), *ends)
    key = ".".join(loc) or cls.__name__
    if detail["type"] == "extra_forbidden":
        owner = _owner(cls, loc[:-1])
        options = owner.model_fields if owner else ()
        return f"unknown key {key!r}.", nearest(loc[-1], options)
    if detail["type"] == "missing":
        return f"missing key {key!r}.", ""
    # A section that contradicts itself says in which of its keys; the others would bury that.
    is_section = detail["type"] == "value_error" and isinstance(detail["input"], Mapping)
    given = key if is_section else f"{key} = {detail['input']!r}"
    return f"{given}: ", f"{detail['msg'].removeprefix('Value error, ')}."


def _owner(cls: type[BaseModel], loc: tuple[str, ...]) -> type[BaseModel] | None:
    for part in loc:
        field = cls.model_fields.get(part)
        inner = next(_models(field.annotation), None) if field else None
        if inner is None:
            return None
        cls = inner
    return cls


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for arg in get_args(annotation):
        yield from _models(arg)
