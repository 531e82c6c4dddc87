"""Programs get a reward for right results only: no program can pass its tests from inside its process."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from interlace.agents.code_tests import CodeTests, find_program, read_tests
from interlace.agents.sandbox.client import Sandbox
from interlace.core.errors import UserError
from interlace.core.types import JSON

CALLS: Sequence[JSON] = (
    {"call": "add(1, 2)", "result": 3},
    {"call": "add(20, 22)", "result": 42},
    "assert add(-1, 1) == 0",
)
STREAMS: Sequence[JSON] = ({"stdin": "1 2\n", "stdout": "3"}, {"stdin": "20 22\n", "stdout": "42\n"})
FIND_FRAME = """
import sys
frame = sys._getframe()
while frame and 'mark' not in frame.f_locals:
    frame = frame.f_back
"""
CHEATS = {
    "end before the tests": "import os\nos._exit(0)",
    "exit with success": "import sys\nsys.exit(0)",
    "always equal": """
class Any:
    def __eq__(self, other): return True
    def __repr__(self): return 'Any()'
def add(a, b): return Any()
print(Any())
""",
    "replaced builtins": """
import builtins, json
builtins.eval = lambda *_: True
builtins.repr = lambda _: 'True'
json.dumps = lambda _: 'true'
def add(a, b): return 0
""",
    "the harness's lists": FIND_FRAME + "if frame: frame.f_locals['calls'].clear()",
    "the harness's lines": FIND_FRAME
    + """
for number in range(9):
    for value in ('3', 'None', 'True', '[3, 42, 0]'):
        if frame: print(frame.f_locals['mark'], number, '"' + value + '"', flush=True)
""",
    "a key of thousands of digits": FIND_FRAME
    + """
if frame: print(frame.f_locals['mark'], 0, '"{0x' + 4000 * 'f' + ': 3}"', flush=True)
""",
    "objects of the process": """
import gc
for each in gc.get_objects():
    if isinstance(each, dict) and each.get('result'): print(each['result'])
""",
    "a trace function": """
import sys
def trace(frame, event, argument):
    frame.f_globals['value'] = '3'
    return trace
sys.settrace(trace)
def add(a, b): return 0
""",
    "an import hook": "import sys\nsys.modules['json'] = sys.modules['sys'] = None\ndef add(a, b): return 0",
    "no program": "add",
    "nothing": "",
    "not a program": "def add(a, b: return a + b",
    "a surrogate": "add = '\ud800'",
    "nested brackets": "(" * 5000,
    "a long result": "def add(a, b): return '(' * 60000",
    "a nested result": """
class Deep:
    def __repr__(self): return '[' * 5000 + ']' * 5000
def add(a, b): return Deep()
""",
    "a result and a crash": "print(3)\nprint(42)\nraise ValueError",
    "endless output": "while True: print('3')",
}


class Scorer:
    """The reward with an event loop."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._reward = CodeTests()

    def passes(self, program: str, tests: JSON) -> bool:
        return self.runner.run(self._reward.score(program, {"tests": tests}))


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    found = Scorer()
    try:
        found.runner.run(Sandbox.start()).close()
    except UserError as error:
        pytest.skip(str(error))
    yield found
    found.runner.close()


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_cheats_fails(scorer: Scorer, name: str) -> None:
    assert not scorer.passes(CHEATS[name], CALLS), "calls"
    assert not scorer.passes(CHEATS[name], STREAMS[:1]), "streams"


def test_a_right_program_passes(scorer: Scorer) -> None:
    added = "def add(a, b):\n    print('adding')\n    return a + b"
    assert scorer.passes(f"<think>```python\nx\n```</think>Here:\n```python\n{added}\n```\nDone.", CALLS)
    assert scorer.passes(added, '[{"call": "add([1], [2])", "result": [1, 2]}]')
    assert scorer.passes("def pair(x): return (x, {x})", ["assert pair(1) == (1, {1})"])
    assert scorer.passes("def pair(x): return (x, x)", [{"call": "pair(1)", "result": [1, 1]}]), "JSON has no tuples"
    by_number = "def name(x, y): return {x: 2, y: [{None: True}]}"
    assert scorer.passes(by_number, [{"call": "name(1, .5)", "result": {"1": 2, "0.5": [{"null": True}]}}]), "nor keys"
    assert not scorer.passes(by_number, [{"call": "name(1, '1')", "result": {"1": [{"null": True}]}}]), "two keys"
    derived = "from collections import Counter\nimport enum\nclass One(enum.IntEnum):\n    ONE = 1\n"
    derived += "def count(x): return Counter(x), frozenset(x), One.ONE, [True]"
    assert scorer.passes(derived, ["assert count('aab') == ({'a': 2, 'b': 1}, {'a', 'b'}, 1, [True])"])
    truth = "class bool_:\n    def item(self): return True\ndef is_one(x): return bool_()"  # as numpy's
    assert scorer.passes(truth, ["assert is_one(1)", "assert is_one(1) == True"])
    reads = "import sys\na, b = map(int, input().split())\nsys.stdout.write(str(a + b))"
    assert scorer.passes(reads, STREAMS)


def test_a_wrong_program_fails_each_kind_of_test(scorer: Scorer) -> None:
    assert not scorer.passes("def add(a, b): return 3", CALLS)
    assert not scorer.passes("print(3)", STREAMS)
    assert not scorer.passes("def add(a, b): return '3'", CALLS[:1])


FORMS: Sequence[tuple[str, str]] = (
    ("assert is_even(2)", "assert is_even(3)"),
    ("assert not is_even(3)", "assert not is_even(2)"),
    ("assert True == is_even(2)", "assert True == is_even(3)"),
    ("assert set(pair(2)) == set((2, 3))", "assert set(pair(2)) == set((2, 4))"),
    ("assert sorted(pair(2)) == list((2, 3))", "assert sorted(pair(2)) == list((3, 2))"),
    ("assert math.isclose(half(1), 0.49, rel_tol=0.1)", "assert math.isclose(half(1), 0.49, rel_tol=0.001)"),
    ("assert abs(half(1) - 0.49) < 0.1", "assert abs(0.49 - half(1)) <= 0.001"),
    ("assert abs(half(4) - 3) <= 1", "assert abs(half(4) - 3) < 1"),
)
"""Asserts of a program: one that holds, and one of the same form that does not."""
PROGRAM = """
import math
def is_even(x): return x % 2 == 0
def pair(x): return (x + 1, x)
def half(x): return x / 2
"""


@pytest.mark.parametrize(("right", "wrong"), FORMS)
def test_asserts_of_several_forms_are_checked_outside(scorer: Scorer, right: str, wrong: str) -> None:
    assert scorer.passes(PROGRAM, [right]) and not scorer.passes(PROGRAM, [wrong])
    replaced = "class math:\n    isclose = lambda *_, **__: True\nabs = lambda _: 0\n"
    own = "def is_even(x): return None\ndef pair(x): return ()\ndef half(x): return 10 ** 400\n"
    if "not" not in right:
        assert not scorer.passes(replaced + own, [right])


@pytest.mark.parametrize(
    "tests",
    [None, [], "[]", "x", 3, [3], [{"stdin": "1"}], [{"call": "f()", "result": 1, "weight": 2}], ["f(1) == 2"],
     ["assert f(1) == g(1)"], ["assert f(1) == 1; x = 2"], ["assert all(f(1))"], ["assert not any(f(1))"],
     ["assert f(1) > 0"], ["assert f(1) and g(1)"], ["assert math.isclose(f(1), g(1))"],
     ["assert math.isclose(f(1), 1, rel_tol=-1)"], ["assert abs(f(1)) < 1"]],
)  # fmt: skip
def test_tests_that_cannot_be_checked_are_refused(tests: JSON) -> None:
    """A row without tests would give its reward to every program."""
    with pytest.raises(UserError, match="test"):
        read_tests(tests)


def test_the_last_block_after_the_thoughts_is_the_program() -> None:
    assert find_program("```py\na\n```\n```python\nb\n```\ntext") == "b\n"
    assert find_program("```Python\na\n``` or\n```python3\r\nb\n```\n") == "b\n"
    assert find_program("<think>```python\na\n```</think>b") == "b"


@pytest.mark.parametrize(
    "response",
    [
        "Plan:\n```text\nadd\n```\nNow the code:\n```python\nright\n```\n",
        "```bash\nls\n```\nthen\n```python\nright\n```\nwhich prints\n```text\n1\n```",
        "```python\nright\n```\nOutput:\n```\n1\n```\n",
        "```text\n1\n```\n```\nright\n```\n",
        "Call ```add(1)``` as in\n```python\nright\n```\n",
    ],
)
def test_blocks_of_other_languages_are_no_programs(response: str) -> None:
    """The text between two blocks was taken for the program."""
    assert find_program(response) == "right\n"


def test_the_time_to_find_a_program_is_linear_in_the_length_of_a_response() -> None:
    """A fence before 16,000 letters without a space took 13 s, in which no other response was scored."""
    response = "```" + "a" * 200_000
    assert find_program(response) == response
