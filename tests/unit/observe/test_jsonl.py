"""Every line is standard JSON, and a truncated file is cut after its last complete line."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.observe.jsonl import lines_until, read_rows, to_line, truncate_after, write_step

VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


def strict(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


@given(st.dictionaries(st.text(), VALUES | st.lists(VALUES)))
def test_a_line_is_strict_json_and_one_line(row: dict[str, object]) -> None:
    line = to_line(row)
    assert line.count("\n") == 1
    assert set(json.loads(line, parse_constant=strict)) == set(row)


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\x85b", "a\r\n\x0b\x0c\x1cb"])
def test_text_that_holds_another_end_of_a_line_comes_back(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"step": 1, "response": text}, {"step": 2, "response": "later"}]
    path.write_text("".join(map(to_line, rows)), encoding="utf-8")
    assert read_rows(path) == rows
    truncate_after(path, 1)
    assert read_rows(path) == rows[:1]


def test_half_of_a_character_is_written_and_comes_back(tmp_path: Path) -> None:
    row = {"step": 1, "reason": "no page \ud83d, ä"}
    write_step(tmp_path / "rows.jsonl", 1, {"reason": row["reason"]})
    assert read_rows(tmp_path / "rows.jsonl") == [row]


def test_a_line_torn_inside_a_character_is_dropped_and_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole, torn = to_line({"step": 1}).encode(), '{"step": 2, "reward/l\u00e4'.encode()[:-1]
    path.write_bytes(whole + torn)
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged.*Remove its last line"):
        read_rows(path)
    truncate_after(path, 2)
    assert path.read_bytes() == whole


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_comes_back_bit_for_bit(value: float) -> None:
    assert json.loads(to_line({"x": value}))["x"] == value


def test_what_json_cannot_say_is_null() -> None:
    row = {"nan": math.nan, "inf": math.inf, "numpy": np.float32("nan"), "array": np.array([1.0, math.nan])}
    assert json.loads(to_line(row)) == {"nan": None, "inf": None, "numpy": None, "array": [1.0, None]}


def test_numpy_becomes_plain_numbers() -> None:
    assert to_line({"a": np.int32(3), "b": np.arange(2, dtype=np.int32)}) == '{"a": 3, "b": [0, 1]}\n'


def test_what_it_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match="is a object, which JSON cannot hold"):
        to_line({"a": object()})


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(-1, 20))
def test_truncation_keeps_exactly_the_steps_up_to_one(steps: list[int], last: int) -> None:
    lines = [to_line({"step": step, "n": n}) for n, step in enumerate(steps)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_text("".join(lines))
        truncate_after(path, last)
        assert path.read_text() == "".join(line for line, step in zip(lines, steps, strict=True) if step <= last)


@pytest.mark.parametrize("torn", ['{"step": 2, "los', '{"step": 2}', "{"])
def test_a_line_torn_by_a_kill_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + torn)
    truncate_after(path, 5)
    assert path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("damaged", ["null", "[1]", "3", '{"reward": 1}', '{"step": null}'])
def test_a_damaged_line_that_is_json_ends_no_command_with_a_traceback(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 2}}\n')
    if not damaged.startswith("{"):
        with pytest.raises(UserError, match=r"metrics\.jsonl is damaged: a line is .* instead of an object"):
            read_rows(path)
    assert list(lines_until(path, 2)) == [1.0, 2.0]
    truncate_after(path, 1)
    assert path.read_text() == '{"step": 1}\n'


def test_a_missing_file_stays_missing(tmp_path: Path) -> None:
    truncate_after(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []
