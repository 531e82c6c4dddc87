"""Converts callable objects to functions, from which tools can be made."""

import inspect
import typing
from collections.abc import Awaitable, Callable
from typing import Any, cast

from interlace.core.callables import unwrap_partial


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
