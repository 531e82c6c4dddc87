"""Tools from functions, classes and MCP servers have correct schemas and arguments, and refuse invalid ones."""

import asyncio
import concurrent.futures
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import pytest

from interlace.agents.tools.base import Tool, ToolError, ToolSource, Visit
from interlace.agents.tools.calculator import calculator
from interlace.agents.tools.config import ToolConfig, all_specs, tool_source
from interlace.agents.tools.function import signature_of
from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.types import JSON, Prompt

HERE = "tests.unit.agents.tools.test_tools"
VISIT = Visit(prompt=Prompt(uid="p", token_ids=np.zeros(1, np.int32), text="x", answer=""), seed=7)


def lookup(word: str, limit: int = 3, mode: Literal["fast", "exact"] = "fast") -> list[str]:
    """Looks a word up
    in a dictionary.

    Args:
        word: to look up
        limit: entries at most

    Returns:
        Entries.
    """
    return [f"{word} {mode}"] * limit


async def later(text: str) -> str:
    """Answers later."""
    await asyncio.sleep(0)
    return text.upper()


def exits() -> str:
    """Ends its process."""
    raise SystemExit(3)


def waits_for_a_cancelled_future() -> object:
    """Waits for nothing."""
    future: concurrent.futures.Future[object] = concurrent.futures.Future()
    future.cancel()
    return future.result()


def takes_from_an_empty_iterator() -> str:
    """Takes the first item of nothing."""
    return next(iter(()))


class Basket:
    """Things of one episode."""

    closed: int = 0

    def __init__(self, size: int, seed: int) -> None:
        self.things: list[str] = []
        self.size, self.seed = size, seed

    def put(self, thing: str) -> str:
        """Puts a thing into the basket."""
        self.things.append(thing)
        return f"{len(self.things)} of {self.size}, {self.seed}"

    def close(self) -> None:
        type(self).closed += 1


class Adder:
    """Sums of one episode."""

    @staticmethod
    def add(first: int, second: int) -> int:
        """Adds two numbers."""
        return first + second


class Empty:
    pass


def no_doc(a: int) -> int:
    return a


def no_type(a) -> int:  # type: ignore[no-untyped-def]
    """Does a thing."""
    return int(a)


def any_number(*a: int) -> int:
    """Does a thing."""
    return sum(a)


def source(entry: object) -> ToolSource:
    return tool_source(ToolConfig.model_validate(entry))


def called(tool: Tool, arguments: Mapping[str, JSON]) -> object:
    return asyncio.run(tool.call(arguments))  # type: ignore[arg-type]


def test_a_schema_comes_from_signature_and_docstring() -> None:
    spec = signature_of(lookup, "lookup").spec
    assert spec.description == "Looks a word up\nin a dictionary."
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "word": {"type": "string", "description": "to look up"},
            "limit": {"type": "integer", "default": 3, "description": "entries at most"},
            "mode": {"type": "string", "enum": ["fast", "exact"], "default": "fast"},
        },
        "required": ["word"],
    }


def test_functions_are_called_with_arguments_of_their_types() -> None:
    [tool] = source(f"{HERE}:lookup").open(VISIT)
    assert called(tool, {"word": "a", "limit": "1"}) == ["a fast"]
    with pytest.raises(ToolError, match=r"wrong arguments: word: Field required"):
        called(tool, {})
    with pytest.raises(ToolError, match=r"limit: .*integer.*; lmit: Extra inputs"):
        called(tool, {"word": "a", "limit": "many", "lmit": 1})
    [tool] = source(f"{HERE}:later").open(VISIT)
    assert called(tool, {"text": "a"}) == "A"
    [tool] = source(f"{HERE}:exits").open(VISIT)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        called(tool, {})


def test_a_tool_that_raises_stop_iteration_fails() -> None:
    [tool] = source(f"{HERE}:takes_from_an_empty_iterator").open(VISIT)

    async def call() -> object:
        return await asyncio.wait_for(tool.call({}), 5)

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(call())


def test_a_tool_that_waits_for_a_cancelled_future_fails() -> None:
    """The episode would take its error for a cancellation of the episode."""
    [tool] = source(f"{HERE}:waits_for_a_cancelled_future").open(VISIT)
    with pytest.raises(RuntimeError, match="CancelledError"):
        called(tool, {})


def test_a_static_method_of_a_class_is_a_tool_with_all_its_parameters() -> None:
    [tool] = source(f"{HERE}:Adder").open(VISIT)
    assert tool.spec.parameters["required"] == ["first", "second"]
    assert called(tool, {"first": 1, "second": 2}) == 3


def test_each_episode_has_an_object_of_its_own() -> None:
    entry = source({"name": f"{HERE}:Basket", "options": {"size": 5}})
    assert [spec.name for spec in entry.specs()] == ["put"]
    first, second = entry.open(VISIT), entry.open(VISIT)
    assert called(first[0], {"thing": "a"}) == "1 of 5, 7"
    assert called(first[0], {"thing": "b"}) == "2 of 5, 7"
    assert called(second[0], {"thing": "c"}) == "1 of 5, 7"
    entry.close(first)
    entry.close(second)
    assert Basket.closed == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (f"{HERE}:no_doc", "tool 'no_doc' has no docstring"),
        (f"{HERE}:no_type", "the parameter 'a' has no type, so the tool has no schema"),
        (f"{HERE}:any_number", r"has the parameter \*a: int, which no schema describes"),
        (f"{HERE}:Empty", "tool class 'Empty' has no public method"),
        (f"{HERE}:Basket", r"tool class 'Basket' cannot be made with options {}: missing .*'size'"),
        (f"{HERE}:HERE", "is a str, not a function or a class"),
        ({"name": f"{HERE}:lookup", "options": {"a": 1}}, "is a function, which takes no options"),
        ("calculatr", "unknown tool 'calculatr'. Did you mean 'calculator'"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused(entry: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        source(entry)


class Section(Config):
    tools: tuple[ToolConfig, ...]


@pytest.mark.parametrize("entry", [{}, {"name": "a", "mcp": "b"}, {"name": "a", "only": ["b"]}, {"mcp": []}])
def test_an_entry_has_one_origin(entry: object) -> None:
    with pytest.raises(UserError, match=r"tools.0: (give a tool|env and only|an MCP server)"):
        Section.parse({"tools": [entry]})


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two tools have the name 'calculator'"):
        all_specs([source("calculator"), source("interlace.agents.tools.calculator:calculator")])


@pytest.mark.parametrize(
    ("expression", "value"), [("12+34", "46"), ("2*(3+4)", "14"), ("7/2", "3.5"), ("-3 % 2", "1"), ("1e3", "1000")]
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "2+", "'a'*3", "__import__('os')", "9**9", "1/0", "(" * 300, "1" * 201, "True"]
)
def test_the_calculator_takes_nothing_else(expression: str) -> None:
    with pytest.raises(ToolError):
        calculator(expression)


def mcp_entry(**more: Sequence[str]) -> dict[str, object]:
    pytest.importorskip("mcp")
    return {"mcp": [sys.executable, "-m", "tests.support.mcp_server"], **more}


def test_an_mcp_server_brings_its_tools_and_keeps_its_state() -> None:
    entry = source(mcp_entry())
    assert sorted(spec.name for spec in entry.specs()) == ["broken", "count", "double"]
    tools = {tool.spec.name: tool for tool in entry.open(VISIT)}
    assert tools["double"].spec.properties["number"] == {"title": "Number", "type": "integer"}

    async def use() -> list[object]:
        found: list[object] = [await tools["double"].call({"number": 21}), await tools["count"].call({})]
        found += await asyncio.gather(tools["count"].call({}), tools["double"].call({"number": 4}))
        with pytest.raises(ToolError, match="Error executing tool broken"):
            await tools["broken"].call({})
        with pytest.raises(ToolError, match="number"):
            await tools["double"].call({"number": "many"})
        return found

    assert asyncio.run(use()) == ["42", "1", "2", "8"]
    assert asyncio.run(tools["count"].call({})) == "1", "another loop has a connection, and a server, of its own"


def test_resources_and_structured_results_of_an_mcp_server_are_read() -> None:
    """The model read `[resource]` in place of the file that a server such as GitHub's returns, or nothing."""
    pytest.importorskip("mcp")
    from mcp.types import CallToolResult, EmbeddedResource, ResourceLink, TextResourceContents

    from interlace.agents.tools.mcp import read_result

    file = EmbeddedResource(type="resource", resource=TextResourceContents(uri="repo://a.py", text="print(1)"))
    link = ResourceLink(type="resource_link", name="b", uri="repo://b.py")
    assert read_result(CallToolResult(content=[file, link])) == "print(1)\n[resource_link: repo://b.py]"
    assert read_result(CallToolResult(content=[], structured_content={"sum": 3})) == '{"sum": 3}'


def test_all_pages_of_an_mcp_servers_tools_are_read() -> None:
    """The model had only those of the first page, and an empty cursor of the last page began with the first again."""
    entry = mcp_entry()
    names = [spec.name for spec in source({**entry, "mcp": [*entry["mcp"], "pages"]}).specs()]
    assert names == ["tool_0", "tool_1", "tool_2"]


@contextmanager
def served_over_http() -> Iterator[str]:
    """The address of a server in a process of its own, as it says it on its standard error."""
    pytest.importorskip("mcp")
    command = [sys.executable, "-m", "tests.support.mcp_server", "http"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = next(found for line in server.stderr if (found := re.search(r"running on (http://\S+)", line)))
            yield f"{said[1]}/mcp"
        finally:
            server.terminate()


def test_an_mcp_server_over_http_is_one_for_all_and_its_end_is_an_error() -> None:
    with served_over_http() as url:
        entry = source({"mcp": url, "only": ["count", "double", "broken"]})
        tools = {tool.spec.name: tool for tool in entry.open(VISIT)}

        async def use() -> list[object]:
            found = await asyncio.gather(*(tools["double"].call({"number": number}) for number in range(8)))
            with pytest.raises(ToolError, match="Error executing tool broken"):
                await tools["broken"].call({})
            return [*found, await tools["count"].call({})]

        assert asyncio.run(use()) == [*(str(2 * number) for number in range(8)), "1"]
        assert asyncio.run(tools["count"].call({})) == "2", "one server for all connections"
    with pytest.raises(ToolError, match="cannot be used"):
        asyncio.run(tools["count"].call({}))


def test_an_mcp_server_that_is_not_there_or_lacks_a_tool_is_refused() -> None:
    with pytest.raises(UserError, match=r"has no tool 'triple'. Known: broken, count, double"):
        source(mcp_entry(only=["triple"])).specs()
    with pytest.raises(UserError, match="MCP server 'no-such-program' cannot be used"):
        source({"mcp": ["no-such-program"]}).specs()
    with pytest.raises(UserError, match=r"MCP server 'http://127.0.0.1:9/mcp' cannot be used"):
        source({"mcp": "http://127.0.0.1:9/mcp"}).specs()
