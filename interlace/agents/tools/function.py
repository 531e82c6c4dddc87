"""Tools made from Python functions, callable objects, and the methods of an object with state, with JSON schemas."""

import asyncio
import concurrent.futures
import contextvars
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from interlace.agents.tools.base import Tool, ToolError, ToolSource, Visit
from interlace.core.callables import unwrap_partial
from interlace.core.errors import UserError
from interlace.core.messages import ToolSpec
from interlace.core.types import JSON
from interlace.runtime.local.own_thread import OwnThread

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


class FunctionTool:
    """Tool made from a function. A function that is not async runs on a separate thread, so that it blocks nothing
    else.
    """

    def __init__(self, function: Callable[..., object], signature: Signature, owner: object = None) -> None:
        """owner: object of the episode that the function belongs to, if any."""
        self._function, self._signature, self.owner = function, signature, owner

    @property
    def spec(self) -> ToolSpec:
        return self._signature.spec

    async def call(self, arguments: Mapping[str, JSON]) -> object:
        call = partial(self._function, **self._signature.arguments(arguments))
        if inspect.iscoroutinefunction(self._function):
            return await cast(Awaitable[object], call())
        return await on_thread(call)


async def on_thread(call: Callable[[], object]) -> object:
    """Runs a call on a separate thread and awaits it. If the await is cancelled, the thread continues: it cannot be
    stopped.

    An awaitable result is awaited here: an async function under a decorator that is not async returns one.
    """
    context = contextvars.copy_context()

    def run() -> object:
        try:
            return context.run(call)
        except BaseException as raised:
            # SystemExit and KeyboardInterrupt end only their call. A future refuses a StopIteration, and takes the
            # CancelledError of another future for its own.
            passes = not isinstance(raised, StopIteration | concurrent.futures.CancelledError)
            if isinstance(raised, Exception) and passes:
                raise
            raise RuntimeError(f"{type(raised).__name__}: {raised}") from None

    thread = OwnThread("call")
    outcome = thread.submit(run)
    thread.end()
    found = await asyncio.wrap_future(outcome)
    return await found if inspect.isawaitable(found) else found


class FunctionSource(ToolSource):
    """Source of one function's tool, which all episodes share."""

    def __init__(self, function: Callable[..., object], name: str) -> None:
        self._tool = FunctionTool(function, signature_of(function, name))

    def specs(self) -> tuple[ToolSpec, ...]:
        return (self._tool.spec,)

    def open(self, visit: Visit) -> Sequence[Tool]:
        del visit
        return (self._tool,)


class StatefulSource(ToolSource):
    """Source of the public methods of a class; each episode gets a separate object.

    The class is called with `options`, and with the episode's `prompt` and `seed` if its parameters have these names. A
    method `close`, which may be async, releases the object and is not a tool.
    """

    def __init__(self, cls: type, options: Mapping[str, JSON]) -> None:
        self._cls, self._options = cls, dict(options)
        methods = {
            name: found for name, found in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")
        }
        methods.pop("close", None)
        if not methods:
            raise UserError(f"tool class {cls.__name__!r} has no public method, and each public method is a tool.")
        self._signatures = {
            name: signature_of(found, name, is_method=not isinstance(inspect.getattr_static(cls, name), staticmethod))
            for name, found in methods.items()
        }
        known = inspect.signature(cls).parameters
        self._given = [name for name in ("prompt", "seed") if name in known and name not in self._options]
        try:
            inspect.signature(cls).bind(**self._options, **dict.fromkeys(self._given))
        except TypeError as error:
            raise UserError(
                f"tool class {cls.__name__!r} cannot be made with options {self._options}: {error}."
            ) from None

    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(signature.spec for signature in self._signatures.values())

    def open(self, visit: Visit) -> Sequence[Tool]:
        made = self._cls(**self._options, **{name: getattr(visit, name) for name in self._given})
        return tuple(FunctionTool(getattr(made, name), signature, made) for name, signature in self._signatures.items())

    def close(self, tools: Sequence[Tool]) -> Awaitable[object] | None:
        owner = next((tool.owner for tool in tools if isinstance(tool, FunctionTool)), None)
        close = getattr(owner, "close", None)
        found = close() if close else None
        return found if inspect.isawaitable(found) else None


def as_function(found: Callable[..., object]) -> Callable[..., object]:
    """Returns a function with the name, docstring, types and signature of a functools.partial or a callable object.

    Arguments that a partial fixes are not arguments of the tool. A function is returned unchanged.
    """
    if inspect.isroutine(found):
        return found
    inner, fixed = unwrap_partial(found)
    own = inner if inspect.isroutine(inner) else type(inner).__call__
    signature = inspect.signature(found)
    shown = [parameter for parameter in signature.parameters.values() if parameter.name not in fixed]

    async def call_async(**arguments: Any) -> object:
        return await cast(Awaitable[object], found(**arguments))

    def call(**arguments: Any) -> object:
        return found(**arguments)

    function: Any = call_async if inspect.iscoroutinefunction(own) else call
    function.__name__ = str(getattr(inner, "__name__", "") or type(inner).__name__)
    function.__doc__ = own.__doc__ or inner.__doc__
    function.__signature__ = signature.replace(parameters=shown)
    function.__annotations__ = typing.get_type_hints(own, include_extras=True)
    return cast(Callable[..., object], function)
