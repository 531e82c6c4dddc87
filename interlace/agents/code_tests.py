"""Reward for programs: the hidden tests of each row, run in the sandbox. The expected results stay outside of it.

A row has its tests in the column `tests`, a list of

- `{"stdin": "1 2", "stdout": "3"}`: the program reads one text and prints the other;
- `{"call": "add(1, 2)", "result": 3}`: an expression of the program's names has this value;
- `"assert add(1, 2) == 3"`: the same, as MBPP writes it. The right side is a literal.

A program shares its process with the harness, so it can replace builtins, end the process or write the harness's output
itself. None of this helps: a process gets the inputs only, and the results are compared outside as plain data. Values
of derived types, such as Counter, IntEnum and numpy's numbers, are written as the plain values that are equal to them.
"""

import ast
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from interlace.agents.sandbox.client import LastingSandbox
from interlace.agents.sandbox.limits import CodeResult
from interlace.core.errors import UserError
from interlace.core.types import JSON

TESTS = "tests"
"""Column of a row's tests."""
TIMEOUT_S = 5.0
"""Time limit of one run of a program: for a test with standard input, or for all calls together."""
_FENCED = re.compile(r"```(?:python|py)?3?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
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
    """True if `result` comes from JSON, which has lists only: a tuple with the same items is equal."""


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
    """Returns the last fenced block of code after the thoughts of a response; without one, all text after them."""
    answer = response.rpartition("</think>")[2]
    blocks = _FENCED.findall(answer)
    return blocks[-1] if blocks else answer


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


def _read_assert(text: str) -> CallTest:
    try:
        match ast.parse(text.strip()).body:
            case [ast.Assert(test=ast.Compare(left=call, ops=[ast.Eq() | ast.Is()], comparators=[expected]))]:
                return CallTest(call=ast.unparse(call), result=ast.literal_eval(expected))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        pass
    raise UserError(
        f"the test {text!r:.80} cannot be checked outside of the program's process: write `assert CALL == LITERAL`."
    )


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
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return bool((_to_lists(value) if test.is_json else value) == test.result)


def _to_lists(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_to_lists(item) for item in value]
    if isinstance(value, dict):
        return {name: _to_lists(item) for name, item in value.items()}
    return value


def _split_lines(text: str) -> list[str]:
    """Returns the lines of an output without the white space at their ends and at the end of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
