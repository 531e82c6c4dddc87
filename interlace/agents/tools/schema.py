"""JSON schemas of Python functions, from their signatures and docstrings."""

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from interlace.agents.tools.base import ToolError
from interlace.core.errors import UserError
from interlace.core.messages import ToolSpec
from interlace.core.types import JSON

SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Examples?):\s*$", re.MULTILINE)
ENTRY = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """Description of a function, with the validation of a call's arguments."""

    spec: ToolSpec
    model: type[BaseModel]

    def arguments(self, given: Mapping[str, JSON]) -> Mapping[str, object]:
        """Returns the arguments converted to their types. Raises ToolError that names each wrong argument."""
        try:
            found = self.model.model_validate(given)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()]
            raise ToolError(f"wrong arguments: {'; '.join(wrong)}") from None
        return {name: getattr(found, name) for name in self.model.model_fields if name in found.model_fields_set}


def signature_of(function: Callable[..., object], name: str, *, is_method: bool = False) -> Signature:
    """Describes a function, or a method without its `self`. Raises UserError for a signature that no schema can
    describe.
    """
    text = inspect.cleandoc(function.__doc__ or "")
    description = SECTION.split(text)[0].strip()
    if not description:
        raise UserError(f"tool {name!r} has no docstring: its first lines are what the model reads of the tool.")
    about = _parse_entries(text)
    try:
        types = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError(f"tool {name!r} has a type that cannot be read: {error}.") from None
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[is_method:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"tool {name!r} has the parameter {parameter}, which no schema describes: name each.")
        if parameter.name not in types:
            raise UserError(
                f"tool {name!r}: the parameter {parameter.name!r} has no type, so the tool has no schema. Annotate it, "
                f"such as {parameter.name}: str."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (types[parameter.name], Field(default, description=about.get(parameter.name)))
    model = _make_model(name, fields)
    return Signature(
        spec=ToolSpec(name=name, description=description, parameters=_make_schema(name, model)), model=model
    )


def _make_model(name: str, fields: dict[str, Any]) -> type[BaseModel]:
    try:
        return cast(type[BaseModel], create_model(name, __config__=ConfigDict(extra="forbid"), **fields))
    except (PydanticUserError, TypeError, NameError) as error:
        raise UserError(f"tool {name!r} has no schema: {str(error).splitlines()[0]}") from None


def _make_schema(name: str, model: type[BaseModel]) -> Mapping[str, JSON]:
    try:
        found = model.model_json_schema()
    except PydanticUserError as error:
        raise UserError(f"tool {name!r} has no schema: {str(error).splitlines()[0]}") from None
    return cast(Mapping[str, JSON], _remove_titles(found))


def _remove_titles(value: object) -> object:
    """Returns a schema without the titles that pydantic derives from names."""
    if isinstance(value, dict):
        named = value.get("properties")
        found = {
            key: _remove_titles(item) for key, item in value.items() if key not in ("title", "additionalProperties")
        }
        if isinstance(named, dict):  # the keys of `properties` are names, which may include `title`
            found["properties"] = {key: _remove_titles(item) for key, item in named.items()}
        return found
    return [_remove_titles(item) for item in value] if isinstance(value, list) else value


def _parse_entries(text: str) -> Mapping[str, str]:
    """Parses the description of each parameter from the lines below `Args:`."""
    parts = SECTION.split(text)
    found: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=False):
        if title in ("Args", "Arguments", "Parameters"):
            matches = [ENTRY.match(line) for line in body.splitlines()]
            found |= {match[1]: match[2].strip() for match in matches if match}
    return found
