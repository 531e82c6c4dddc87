"""Untrusted YAML that would exhaust time, memory or the screen is refused with its position."""

import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.yaml_text import parse_yaml, to_json_text


def laughs(levels: int) -> str:
    """Nested aliases, each level nine times the one before."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [f"steps: {'9' * 5000}", "steps: 2024-13-45", f"a: 1\nb: [{'7' * 4400}]"])
def test_a_value_that_python_cannot_hold_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="cannot be read") as raised:
        parse_yaml(text)
    assert "line" in str(raised.value) and len(str(raised.value)) < 1000


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "a: 1\nb: 2\n7: 3", "a:\n  b: 1\n  b: 2"])
def test_a_key_that_is_refused_is_named_with_its_line(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"line 3, column"):
        parse_yaml(text)


@pytest.mark.parametrize("levels", [5, 9, 40])
def test_aliases_that_expand_to_many_values_are_refused_at_once(levels: int) -> None:
    start = time.process_time()
    with pytest.raises(yaml.YAMLError, match="aliases expand to more than 10000 values"):
        parse_yaml(laughs(levels))
    assert time.process_time() - start < 1


def test_a_value_that_contains_itself_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="aliases expand"):
        parse_yaml("a: &a [1, *a]")


def test_aliases_and_long_lists_are_read() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: *a") == {"a": {"x": 1}, "b": {"x": 1}}
    assert parse_yaml(laughs(3))["a2"][8][8] == ["x"] * 9
    assert len(parse_yaml(f"a: [{'1, ' * 20000}]")["a"]) == 20000


@given(st.text(st.characters(codec=None), max_size=20))
def test_json_text_is_the_same_value_in_yaml(text: str) -> None:
    assert parse_yaml(to_json_text({"key": [text]})) == {"key": [text]}
