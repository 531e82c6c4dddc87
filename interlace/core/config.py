"""The base of every configuration: frozen, typed, one default for each field, unknown keys refused by name."""

from collections.abc import Iterator, Mapping
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from interlace.core.errors import UserError, nearest


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
    return "\n".join(prefix + _sentence(cls, detail) for detail in error.errors())


def _sentence(cls: type[BaseModel], detail: ErrorDetails) -> str:
    loc = tuple(str(part) for part in detail["loc"])
    key = ".".join(loc) or cls.__name__
    if detail["type"] == "extra_forbidden":
        owner = _owner(cls, loc[:-1])
        options = owner.model_fields if owner else ()
        return f"unknown key {key!r}.{nearest(loc[-1], options)}"
    if detail["type"] == "missing":
        return f"missing key {key!r}."
    # A section that contradicts itself says in which of its keys; the others would bury that.
    is_section = detail["type"] == "value_error" and isinstance(detail["input"], Mapping)
    given = key if is_section else f"{key} = {detail['input']!r}"
    return f"{given}: {detail['msg'].removeprefix('Value error, ')}."


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
