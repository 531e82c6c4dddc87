"""Untrusted YAML that would exhaust time, memory or the screen is refused with its position."""

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.core.yaml_text import parse_yaml, read_mapping, to_json_text
from interlace.forecast.costs.markets import load_market
from interlace.forecast.costs.profiles import load_profile
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"market 'x' \(.*x.yaml\) cannot be read: No such file or directory. Give another one.$"),
        (b"\x80", r"market 'x' \(.*x.yaml\) is not YAML: .*\nGive another one.$"),
        (b"- 1", r"market 'x' \(.*x.yaml\) contains no settings: it is a list. Give another one.$"),
        (b"", r"market 'x' \(.*x.yaml\) contains no settings: it is empty. Give another one.$"),
    ],
)
def test_a_file_without_a_mapping_is_refused_by_its_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_mapping(path, "market 'x'", remedy="Give another one.")


def test_every_reader_of_settings_refuses_a_damaged_file_in_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("- 1")
    messages = set()
    for kind, load in (
        ("recipe", load_recipe),
        ("schedule", load_schedule),
        ("profile", load_profile),
        ("market", load_market),
    ):
        with pytest.raises(UserError) as raised:
            load(str(path))
        messages.add(str(raised.value).replace(kind, "KIND", 1))
    expected = f"KIND {str(path)!r} ({path}) contains no settings: it is a list. Write one `key: value` on each line."
    assert messages == {expected}


@given(st.text(st.characters(codec=None), max_size=20))
def test_json_text_is_the_same_value_in_yaml(text: str) -> None:
    assert parse_yaml(to_json_text({"key": [text]})) == {"key": [text]}


def test_numbers_are_read_as_they_look() -> None:
    """YAML 1.1 reads 010 as 8 and 1:30 as 90: `steps=010` ran 8 steps, and a template 1:30 became a number."""
    assert parse_yaml("[1:30, 12:30:15.5, 1_000, 0x1F, 0, 0.5]") == ["1:30", "12:30:15.5", 1000, 31, 0, 0.5]
    for number in ("010", "-017", "00"):
        with pytest.raises(yaml.YAMLError, match="is octal in YAML"):
            parse_yaml(f"steps: {number}")
    assert parse_yaml("steps: '010'") == {"steps": "010"}
    for collection in ("!!int [1]", "!!float {1: 2}"):
        with pytest.raises(yaml.YAMLError, match="expected a scalar"):
            parse_yaml(f"steps: {collection}")


def test_an_anchor_of_a_mapping_that_merges_another_one_may_be_merged_at_a_higher_level() -> None:
    """The key that replaces a merged one was refused as written twice."""
    text = "first: &first {x: 1, y: 2}\ninner: {second: &second {<<: *first, x: 3}}\nthird: {<<: *second}"
    assert parse_yaml(text)["third"] == {"x": 3, "y": 2}
