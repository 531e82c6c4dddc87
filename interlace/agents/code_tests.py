"""Reward for programs: the hidden tests of each row, run in the sandbox. The expected results stay outside of it.

A row has its tests in the column `tests`, a list of

- `{"stdin": "1 2", "stdout": "3"}`: the program reads one text and prints the other;
- `{"call": "add(1, 2)", "result": 3}`: an expression of the program's names has this value;
- `"assert add(1, 2) == 3"`: the same, as MBPP writes it. One side is a literal, or `set` or another container of one.
  Further forms are `assert is_even(2)`, `assert not is_even(3)`, `assert math.isclose(half(1), 0.5)` and
  `assert abs(half(1) - 0.5) < 1e-6`.

A program shares its process with the harness, so it can replace builtins, end the process or write the harness's output
itself. None of this helps: a process gets the inputs only, and the results are compared outside as plain data. Values
of derived types, such as Counter, IntEnum and numpy's numbers, are written as the plain values that are equal to them.
"""

import ast
import builtins
import json
import math
import re
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from interlace.agents.sandbox.client import LastingSandbox
from interlace.agents.sandbox.limits import CodeResult
from interlace.core.errors import UserError
from interlace.core.types import JSON

TESTS = "tests"
"""Column of a row's tests."""
TIMEOUT_S = 5.0
"""Time limit of one run of a program: for a test with standard input, or for all calls together."""
_FENCED = re.compile(r"```[^`\n]++```|```([^\s`]*+)[^`\n]*+\n(.*?)```", re.DOTALL)
"""Code within a line, or a block with its language and its text."""
_PYTHON = ("python", "python3", "py", "py3")
"""Languages of the blocks that are programs. Blocks without a language are programs if there is none of these."""
_HARNESS = """
import json, numbers, sys

def to_plain(value):
    if isinstance(value, dict):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(to_plain, value))
    if isinstance(value, (set, frozenset)):
        return set(map(to_plain, value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if type(value).__name__ in ("bool", "bool_") and hasattr(value, "item"):
        return value.item()
    return value

program, calls, mark = (json.loads(sys.stdin.readline()) for _ in range(3))
names = {"__name__": "solution"}
exec(compile(program, "<solution>", "exec"), names)
for number, call in enumerate(calls):
    try:
        value = repr(to_plain(eval(call, names)))
    except Exception:
        continue
    print("\\n" + mark, number, json.dumps(value), flush=True)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamTest:
    """Standard input of a program, and the output that it must print."""

    stdin: str
    stdout: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTest:
    """Expression of a program's names, and the value that it must have."""

    call: str
    result: object
    """Plain data: numbers, texts, and lists, tuples, sets and dicts of them."""
    is_json: bool = False
    """True if `result` comes from JSON, which has neither tuples nor keys that are numbers: values are compared as JSON
    writes them."""
    is_truth: bool = False
    """True if only the truth of the value counts. `result` is the truth that it must have."""
    tolerance: Mapping[str, float] | None = None
    """Arguments of math.isclose, which then compares the value with `result`. If None, both are equal."""


CodeTest: TypeAlias = StreamTest | CallTest


class CodeTests:
    """Reward function with one sandbox, which starts at its first call."""

    def __init__(self) -> None:
        self._sandbox = LastingSandbox()

    async def score(self, response: str, metadata: Mapping[str, JSON]) -> bool:
        """Returns whether the program in a response passes all tests of its row.

        Raises UserError if the row has no tests that can be read, or this machine lacks a guard of the sandbox.
        """
        tests = read_tests(metadata.get(TESTS))
        program = find_program(response)
        calls = [test for test in tests if isinstance(test, CallTest)]
        if calls and not await self._passes_calls(program, calls):
            return False
        for test in tests:
            if isinstance(test, StreamTest) and not await self._prints_output(program, test):
                return False
        return True

    async def _passes_calls(self, program: str, tests: Sequence[CallTest]) -> bool:
        mark = secrets.token_hex(8)
        lines = (program, [test.call for test in tests], mark)
        result = await self._sandbox.run(_HARNESS, stdin="\n".join(map(json.dumps, lines)), timeout_s=TIMEOUT_S)
        found = _read_values(result, mark)
        return all(_has_result(test, found.get(number)) for number, test in enumerate(tests))

    async def _prints_output(self, program: str, test: StreamTest) -> bool:
        # The sandbox prints the value of a last expression, such as sys.stdout.write(...): a statement follows it.
        result = await self._sandbox.run(f"{program}\npass\n", stdin=test.stdin, timeout_s=TIMEOUT_S)
        is_complete = result.exit_code == 0 and not result.timed_out and not result.num_dropped_bytes
        return is_complete and _split_lines(result.stdout) == _split_lines(test.stdout)


def find_program(response: str) -> str:
    """Returns the last fenced block of Python after the thoughts of a response.

    Without one, returns the last block without a language; without such a block, all text after the thoughts.
    """
    answer = response.rpartition("</think>")[2]
    blocks = [(match[1].lower(), match[2]) for match in _FENCED.finditer(answer) if match[2] is not None]
    programs = [text for language, text in blocks if language in _PYTHON]
    others = [text for language, text in blocks if not language]
    return (programs or others or [answer])[-1]


def read_tests(given: JSON) -> Sequence[CodeTest]:
    """Reads the tests of a row: a list, or a text with its JSON. Raises UserError if a test cannot be read."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise UserError(f"the column {TESTS!r} is not JSON: {error}.") from None
    if not isinstance(given, list | tuple) or not given:
        raise UserError(
            f"the column {TESTS!r} is {given!r:.80}: code_tests needs a list of at least one test in each row, such as"
            ' {"stdin": "1 2", "stdout": "3"} or "assert add(1, 2) == 3".'
        )
    return [_read_test(test) for test in given]


def _read_test(given: JSON) -> CodeTest:
    match given:
        case {"stdin": str(stdin), "stdout": str(stdout), **others} if not others:
            return StreamTest(stdin=stdin, stdout=stdout)
        case {"call": str(call), "result": result, **others} if not others:
            return CallTest(call=call, result=result, is_json=True)
        case str(text):
            return _read_assert(text)
    raise UserError(
        f"the test {given!r:.80} has none of the forms of code_tests: stdin and stdout, call and result, or an assert."
    )


_CONSTRUCTORS: Mapping[str, Callable[[Any], object]] = {
    each.__name__: each for each in (dict, frozenset, list, set, tuple)
}
"""Types whose values an assert may write as a call of a literal, such as `set((1, 2))`."""


def _read_assert(text: str) -> CallTest:
    try:
        match ast.parse(text.strip()).body:
            case [ast.Assert(test=condition)]:
                return _read_condition(condition)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        pass
    raise UserError(
        f"the test {text!r:.80} cannot be checked outside of the program's process: write `assert CALL == LITERAL`, "
        "`assert NAME(...)`, `assert not NAME(...)` or `assert math.isclose(CALL, NUMBER)`."
    )


def _read_condition(node: ast.expr) -> CallTest:
    """Reads the condition of an assert. Raises ValueError if it cannot be checked outside of the program's process.

    The program gets calls whose values are compared here. It may replace every name, so `abs`, `math.isclose` and the
    built-in functions that return a truth are not called in its process.
    """
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Name()) as denied):
            return replace(_read_condition(denied), result=False)
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(op=ast.Sub()) as gap]),
            ops=[ast.Lt() | ast.LtE() as op],
            comparators=[bound],
        ):
            largest = _read_number(bound)
            if isinstance(op, ast.Lt):  # math.isclose accepts a difference of `abs_tol`
                largest = math.nextafter(largest, -math.inf)
            return _read_close(gap.left, gap.right, {"rel_tol": 0.0, "abs_tol": largest})
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            call, expected = (right, left) if _is_literal(left) else (left, right)
            return CallTest(call=ast.unparse(call), result=_read_literal(expected))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="isclose"), args=[left, right]):
            return _read_close(left, right, {str(each.arg): _read_number(each.value) for each in node.keywords})
        case ast.Call(func=ast.Name(id=name)) if not hasattr(builtins, name):
            return CallTest(call=ast.unparse(node), result=True, is_truth=True)
    raise ValueError(f"{ast.unparse(node)} is not a condition on one value")


def _read_close(left: ast.expr, right: ast.expr, tolerance: Mapping[str, float]) -> CallTest:
    call, expected = (right, left) if _is_literal(left) else (left, right)
    result = _read_number(expected)
    math.isclose(result, result, **tolerance)  # refuses unknown and negative arguments
    return CallTest(call=ast.unparse(call), result=result, tolerance=tolerance)


def _read_literal(node: ast.expr) -> object:
    """Returns the value of a literal, or of a constructor's call with one. Raises ValueError for other expressions."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _CONSTRUCTORS:
            return _CONSTRUCTORS[name](_read_literal(argument))
        case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name in _CONSTRUCTORS:
            return _CONSTRUCTORS[name](())
    return ast.literal_eval(node)


def _is_literal(node: ast.expr) -> bool:
    try:
        _read_literal(node)
    except ValueError:
        return False
    return True


def _read_number(node: ast.expr) -> float:
    value = ast.literal_eval(node)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _read_values(result: CodeResult, mark: str) -> dict[int, str]:
    """Returns the printed values by the numbers of their calls. The program may have printed any of these lines."""
    found: dict[int, str] = {}
    for line in result.stdout.split("\n"):
        head, _, rest = line.partition(" ")
        number, _, value = rest.partition(" ")
        if head == mark and number.isascii() and number.isdigit() and len(number) < 10:
            found[int(number)] = value
    return found


def _has_result(test: CallTest, printed: str | None) -> bool:
    if printed is None:
        return False
    try:
        value = ast.literal_eval(json.loads(printed))
        if test.is_json:  # fails for a key that is an integer of thousands of digits
            value = _to_json_form(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    if test.is_truth:
        return bool(value) == test.result
    if test.tolerance is not None:
        return _is_close(value, test.result, test.tolerance)
    return bool(value == test.result)


def _is_close(value: object, expected: object, tolerance: Mapping[str, float]) -> bool:
    if not isinstance(value, int | float) or not isinstance(expected, float):
        return False
    try:
        return math.isclose(value, expected, **tolerance)
    except OverflowError:  # an integer that is larger than each float
        return False


def _to_json_form(value: object) -> object:
    """Returns a value as it is after a round trip through JSON: tuples are lists, and the keys of objects are texts.

    A dict with two keys of one text, such as 1 and "1", keeps its keys: no object of JSON is equal to it.
    """
    if isinstance(value, list | tuple):
        return [_to_json_form(item) for item in value]
    if isinstance(value, dict):
        names = [_write_key(name) for name in value]
        items = [_to_json_form(item) for item in value.values()]
        return dict(zip(names if len(set(names)) == len(names) else value, items, strict=True))
    return value


def _write_key(key: Hashable) -> Hashable:
    """Returns the text that JSON has for a key of a dict; other keys, such as tuples, as they are."""
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else key


def _split_lines(text: str) -> list[str]:
    """Returns the lines of an output without the white space at their ends and at the end of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
