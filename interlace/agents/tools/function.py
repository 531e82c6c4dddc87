"""Tools made from Python functions, callable objects, and the methods of an object with state."""

import asyncio
import concurrent.futures
import contextvars
import inspect
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from interlace.agents.tools.base import Tool, ToolSource, Visit
from interlace.agents.tools.schema import Signature, signature_of
from interlace.core.callables import unwrap_partial
from interlace.core.errors import UserError
from interlace.core.messages import ToolSpec
from interlace.core.types import JSON
from interlace.runtime.local.own_thread import OwnThread


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
