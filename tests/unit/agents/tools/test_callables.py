"""A functools.partial and an object with __call__ are valid tools."""

import asyncio
import functools
from collections.abc import Callable

import pytest

from interlace.agents.tools.function import FunctionTool, as_function, signature_of


def look(query: str, top_k: int = 3) -> str:
    """Looks it up."""
    return query * top_k


def logged(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*arguments: object, **named: object) -> object:
        return function(*arguments, **named)

    return call


@logged
async def find(query: str) -> str:
    """Looks it up."""
    return f"{query}?"


class Caller:
    async def __call__(self, query: "str") -> str:
        """Looks it up."""
        return f"{query}!"


@pytest.mark.parametrize(
    ("found", "name", "answer"), [(functools.partial(look, top_k=2), "look", "aa"), (Caller(), "Caller", "a!")]
)
def test_an_object_that_can_be_called_is_a_tool(found: object, name: str, answer: str) -> None:
    function = as_function(found)  # type: ignore[arg-type]
    tool = FunctionTool(function, signature_of(function, function.__name__))
    assert tool.spec.name == name and list(tool.spec.properties) == ["query"]
    assert asyncio.run(tool.call({"query": "a"})) == answer


def test_an_async_function_under_a_decorator_that_is_not_async_is_awaited() -> None:
    """The model read `<coroutine object find at 0x...>` as the result of its call."""
    tool = FunctionTool(find, signature_of(find, "find"))
    assert asyncio.run(tool.call({"query": "a"})) == "a?"
