"""A tokenizer's chat template, applied under limits: it is a program that came with a model of another author.

jinja's sandbox keeps a template away from Python's internals, but `'x' * 10**10` and nested loops exhaust memory and
time. Here, the syntax tree of the template is rewritten before it is compiled: loops, calls, filters and operators
that can grow a value go through the functions of this module, which count steps and bound sizes.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jinja2 import Environment, TemplateError, TemplateRuntimeError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from interlace.core.types import JSON

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SECONDS = 10.0
"""CPU seconds of the thread that renders one conversation. A busy machine delays a rendering, and fails none."""
MAX_STEPS = 500_000
"""Iterations, calls and operations while one conversation is written."""
MAX_SIZE = 1 << 23
"""Characters of a text, or of a collection with all that it contains; each value counts as _VALUE_SIZE."""
_VALUE_SIZE = 64
_MAX_BITS = 4096
"""Bits of an integer that is multiplied."""

_WIDE = re.compile(r"%[-+ #0]*(\d{5}|\*)|:[^{}]*\d{5}")
"""Widths of printf and of str.format of five digits or more, or taken from an argument."""

_Value = TypeVar("_Value")


class ChatTemplateError(ValueError):
    """The template refused the conversation, or exceeded a limit."""


class _LimitExceededError(TemplateRuntimeError):
    pass


@dataclass(slots=True)
class _Budget:
    """Remaining steps of one rendering."""

    steps: int
    until_s: float

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise _LimitExceededError(f"the template makes more than {MAX_STEPS} steps")
        if time.thread_time() > self.until_s:
            raise _LimitExceededError(f"the template needs more than {MAX_SECONDS:g} s of CPU time")


_BUDGET: ContextVar[_Budget] = ContextVar("budget")


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, JSON]],
    *,
    tools: Sequence[Mapping[str, JSON]] | None = None,
    add_generation_prompt: bool,
    variables: Mapping[str, bool | int | float | str] | None = None,
) -> str:
    """Writes a conversation with the tokenizer's chat template. variables: further ones of the template, such as
    `enable_thinking`. ChatTemplateError if the template fails."""
    try:
        source = tokenizer.get_chat_template(tools=list(tools) if tools else None)  # type: ignore[arg-type]
        with _apply_limits():
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],  # type: ignore[arg-type]  # messages may hold tool calls
                tools=tools,  # type: ignore[arg-type]  # schemas hold other values than texts
                chat_template=_limit_template(source) if isinstance(source, str) else source,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **cast(dict[str, Any], variables or {}),
            )
    except (TemplateError, TypeError, ValueError, ArithmeticError, MemoryError, RecursionError, LookupError) as error:
        raise ChatTemplateError(str(error)[:500].rstrip(".") or type(error).__name__) from error
    return str(text)


@contextmanager
def _apply_limits() -> Iterator[None]:
    token = _BUDGET.set(_Budget(steps=MAX_STEPS, until_s=time.thread_time() + MAX_SECONDS))
    try:
        yield
    finally:
        _BUDGET.reset(token)


@lru_cache(maxsize=16)
def _limit_template(source: str) -> nodes.Template:
    """Parses a template and rewrites it. jinja compiles a syntax tree as it compiles a text."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    tree = environment.parse(source)
    _Rewriter().visit(tree)
    return tree.set_environment(environment)  # type: ignore[return-value]  # it returns the tree


class _Generation(Extension):
    """The tag `generation` of transformers, which marks the model's tokens: its body is written as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Rewriter(NodeTransformer):
    """Replaces the expressions that need a limit by calls of this module's functions."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _make_call("count_items", node.iter)
        return node

    def visit_Mul(self, node: nodes.Mul) -> nodes.Node:
        self.generic_visit(node)
        return _make_call("multiply", node.left, node.right)

    def visit_Pow(self, node: nodes.Pow) -> nodes.Node:
        self.generic_visit(node)
        return _make_call("raise_to_power", node.left, node.right)

    def visit_Mod(self, node: nodes.Mod) -> nodes.Node:
        self.generic_visit(node)
        return _make_call("take_modulo", node.left, node.right)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        node.args.insert(0, node.node)
        node.node = _import_function("call_limited")
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is None:  # of a block, whose text it receives
            if node.args or node.kwargs or node.dyn_args or node.dyn_kwargs:
                raise TemplateError(f"the filter {node.name!r} of a block has arguments, which are not supported")
            return node
        arguments = [nodes.Const(node.name), node.node, *node.args]
        call = nodes.Call(_import_function("filter_limited"), arguments, node.kwargs, node.dyn_args, node.dyn_kwargs)
        return call.set_lineno(node.lineno)

    def visit_growing(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _make_call("check_size", node)

    visit_Add = visit_Concat = visit_growing

    def visit_collection(self, node: nodes.Literal) -> nodes.Node:
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") != "load"  # `for key, value in ...`
        is_constant = all(isinstance(item, nodes.Const) for item in node.iter_child_nodes())
        return node if is_target or is_constant else _make_call("check_size", node)

    visit_List = visit_Tuple = visit_Dict = visit_collection


def _import_function(name: str) -> nodes.ImportedName:
    return nodes.ImportedName(f"{__name__}.{name}")


def _make_call(name: str, *arguments: nodes.Node) -> nodes.Call:
    return nodes.Call(_import_function(name), [*arguments], [], None, None).set_lineno(arguments[0].lineno)  # type: ignore[return-value]


def count_items(values: Iterable[_Value]) -> Iterable[_Value]:
    """Spends one step for each item of a loop."""
    items = values if hasattr(values, "__len__") else list(values)
    _BUDGET.get().spend(1 + len(items))  # type: ignore[arg-type]  # it has a length
    return items


def check_size(value: _Value) -> _Value:
    """Returns the value. Raises TemplateError if it is too large."""
    _BUDGET.get().spend()
    _measure_value(value, MAX_SIZE)
    return value


def multiply(left: Any, right: Any) -> Any:
    """Multiplies two values of a template."""
    _BUDGET.get().spend()
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_SIZE:
            raise _LimitExceededError(f"the template repeats a value {times:.3g} times")
    _check_bits(left, right)
    return left * right


def raise_to_power(left: Any, right: Any) -> Any:
    """Raises a number of a template to a power."""
    _BUDGET.get().spend()
    _check_bits(left, right)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
        raise _LimitExceededError("the template raises a number to a large power")
    return left**right


def take_modulo(left: Any, right: Any) -> Any:
    """Computes the remainder of numbers, or formats a text."""
    _BUDGET.get().spend()
    if isinstance(left, str) and _WIDE.search(left):
        raise _LimitExceededError("the template formats a text with a large width")
    return check_size(left % right)


@pass_context
def call_limited(context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:  # house: as jinja calls it
    """Calls a function or method for a template."""
    _BUDGET.get().spend()
    subject = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    if isinstance(subject, str):
        _check_growth(str(getattr(function, "__name__", "")), subject, (*args, *kwargs.values()))
    # The environment of transformers is sandboxed: it refuses functions that are not safe.
    return check_size(context.environment.call(context, function, *args, **kwargs))  # type: ignore[attr-defined]


@pass_context
def filter_limited(context: Context, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:  # house: jinja calls it
    """Applies a filter for a template."""
    _BUDGET.get().spend()
    _check_growth(name, value, (*args, *kwargs.values()))
    return check_size(context.environment.call_filter(name, value, args, kwargs, context, context.eval_ctx))


def _measure_value(value: object, most: int) -> int:
    """Returns the size of a value with all that it contains. Raises TemplateError if it is more than `most`."""
    size = len(value) if isinstance(value, str) else _VALUE_SIZE
    if isinstance(value, Mapping):
        parts: Iterable[object] = value.values()
    else:
        parts = value if isinstance(value, list | tuple) else ()
    for part in parts:
        if size > most:
            break
        size += _measure_value(part, most - size)
    if size > most:
        raise _LimitExceededError(f"the template builds a value of more than {MAX_SIZE} characters")
    return size


def _check_growth(name: str, subject: object, arguments: Sequence[object]) -> None:
    """Refuses a method of a text, or a filter, whose result would be too large. name: of the method or filter."""
    numbers = [abs(each) for each in arguments if isinstance(each, int) and not isinstance(each, bool)]
    texts = [each for each in arguments if isinstance(each, str)]
    size = 1 + _measure_value(subject, MAX_SIZE)
    growth = size * max(numbers, default=0)
    if name == "replace" and isinstance(subject, str) and len(texts) >= 2:
        growth = subject.count(texts[0]) * len(texts[1])
    elif name == "join":
        growth = max([size * len(each) for each in arguments if isinstance(each, str | list | tuple)], default=0)
    elif name in ("indent", "wordwrap"):
        growth = size * max([*numbers, *map(len, texts)], default=0)
    is_format = name in ("format", "format_map") and isinstance(subject, str)
    if growth > 4 * MAX_SIZE or (is_format and (_WIDE.search(str(subject)) or max(numbers, default=0) > MAX_SIZE)):
        raise _LimitExceededError(f"the result of {name!r} would be too large")


def _check_bits(*numbers: object) -> None:
    if any(isinstance(number, int) and number.bit_length() > _MAX_BITS for number in numbers):
        raise _LimitExceededError("the template computes with a large number")
