"""The hidden inputs of the recipe `code` tell wrong programs from right ones."""

import math

import pytest

from interlace.agents.examples.hidden_tests import HIDDEN_INPUTS, PROGRAMS


@pytest.mark.parametrize(
    ("program", "task"),
    [("sorted(set(x))", "sorted(x)"), ("math.gcd(*x[-3:])", "math.gcd(*x)"), ("math.gcd(*x[:3])", "math.gcd(*x)")],
)
def test_programs_that_are_right_for_few_inputs_fail(program: str, task: str) -> None:
    """These passed five fixed inputs."""
    found = [eval(program, {"math": math, "x": list(x)}) == PROGRAMS[task](list(x)) for x in HIDDEN_INPUTS]
    assert all(found[:5]) and not all(found)
