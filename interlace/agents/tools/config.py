"""Settings of tools in a recipe."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

from pydantic import Field, JsonValue, model_validator

import interlace.agents.tools as builtin
from interlace.agents.tools.base import ToolSource
from interlace.agents.tools.function import FunctionSource, StatefulSource, as_function
from interlace.agents.tools.mcp import McpSource
from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.messages import ToolSpec
from interlace.core.plugins import builtin_module, load_object

HIDDEN = ("base", "callables", "config", "function", "mcp", "schema")
"""Modules of this folder that are not tools."""


class ToolConfig(Config):
    """Entry of a list of tools: the name alone, or a mapping."""

    name: str | None = None
    """Built-in tool, or your function or class as package.module:Name. Each public method of a class is a tool."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the class; each episode gets a separate object."""
    mcp: str | tuple[str, ...] | None = None
    """URL of an MCP server, or the command that starts one; replaces `name`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of that command. If empty, the command gets the few variables that the MCP client passes on."""
    only: tuple[str, ...] | None = None
    """Names of the server's tools to use; None for all."""

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, data: object) -> object:
        return {"name": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        if (self.name is None) == (self.mcp is None):
            raise ValueError("give a tool by its name or by an MCP server (mcp), one of the two")
        if self.name is not None and (self.env or self.only is not None):
            raise ValueError("env and only are of an MCP server, and this tool has a name")
        if self.mcp is not None and (self.options or not self.mcp):
            raise ValueError("an MCP server is given by its URL or a command, and takes no options")
        return self


def tool_source(config: ToolConfig) -> ToolSource:
    """Creates the source of an entry. Raises UserError if it does not exist, or a tool cannot be described."""
    if config.mcp is not None:
        return McpSource(config.mcp, config.env, config.only)
    name = config.name or ""
    found = load_object("tool", name) if ":" in name else _find_builtin(name)
    if inspect.isclass(found) and issubclass(found, ToolSource):
        return cast(Callable[..., ToolSource], found)(config.options)
    if inspect.isclass(found):
        return StatefulSource(found, config.options)
    if not callable(found):
        raise UserError(f"tool {name!r} is a {type(found).__name__}, not a function or a class.")
    if config.options:
        raise UserError(f"tool {name!r} is a function, which takes no options ({', '.join(config.options)}).")
    function = as_function(found)
    return FunctionSource(function, function.__name__)


def _find_builtin(name: str) -> Any:
    """Finds a built-in: the function with the name of its module, or the module's tool source."""
    module = builtin_module("tool", builtin, name, hidden=HIDDEN)
    own = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    return getattr(module, name, None) or next(each for each in own if issubclass(each, ToolSource))


def all_specs(sources: Sequence[ToolSource]) -> tuple[ToolSpec, ...]:
    """Returns the tools of all sources. Raises UserError if two have the same name."""
    found: dict[str, ToolSpec] = {}
    for spec in (spec for source in sources for spec in source.specs()):
        if spec.name in found:
            raise UserError(f"two tools have the name {spec.name!r}: the model could not tell them apart. Rename one.")
        found[spec.name] = spec
    return tuple(found.values())
