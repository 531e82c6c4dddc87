"""Rows of a program are stored unchanged, or refused with their index."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas
import pytest

from interlace.core.errors import UserError
from interlace.rewards.signature import reward_call
from interlace.run import program_data
from interlace.run.program_data import rows_by_place, write_rows

CALLS = (reward_call(lambda response, answer: 1.0),)
NESTED = {"question": "1+1", "reward_model": {"ground_truth": "2"}}


def written(rows: object, root: Path, columns: dict[str, str] | None = None) -> list[dict[str, object]]:
    path = write_rows(rows, columns or {}, CALLS, root)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_columns_are_mapped_and_the_others_stay(tmp_path: Path) -> None:
    columns = {"prompt": "question", "answer": "reward_model.ground_truth"}
    assert written([NESTED], tmp_path, columns) == [{**NESTED, "prompt": "1+1", "answer": "2"}]


@pytest.mark.parametrize("make", [list, np.array])
def test_an_item_of_a_list_is_named_by_its_number_as_in_a_file(tmp_path: Path, make: object) -> None:
    rows = [{"prompt": "1+1", "targets": make(["2", "two"])}]  # type: ignore[operator]
    assert written(rows, tmp_path, {"answer": "targets.1"})[0]["answer"] == "two"


@pytest.mark.parametrize("make", [list, tuple, iter, pandas.DataFrame])
def test_any_rows_are_read(tmp_path: Path, make: object) -> None:
    rows = [{"prompt": "a", "answer": "b", "level": 1}, {"prompt": "c", "answer": "d", "level": 2}]
    assert written(make(rows), tmp_path) == rows  # type: ignore[operator]


def test_rows_without_an_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were read until the memory was full."""
    monkeypatch.setattr(program_data, "MAX_STREAMED", 50)
    made = ({"prompt": str(number), "answer": ""} for number in itertools.count())
    with pytest.raises(UserError, match=r"data is a generator without a length, which has given 50 rows .*islice"):
        written(made, tmp_path)
    assert len(written(itertools.islice(made, 50), tmp_path)) == 50
    assert len(written([{"prompt": "a", "answer": ""}] * 60, tmp_path)) == 60


def test_programs_that_start_at_once_write_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(2000)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: written(rows, tmp_path), range(24))]
    assert all(each == rows for each in found)


def test_gaps_of_a_data_frame_are_null(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b", "level": 1.5, "hint": "x"}, {"prompt": "c", "answer": "d"}]
    assert written(pandas.DataFrame(rows), tmp_path) == [rows[0], {**rows[1], "level": None, "hint": None}]


def test_numbers_of_numpy_are_written(tmp_path: Path) -> None:
    [row] = written([{"prompt": "a", "answer": np.float32(0.5), "x": np.arange(2)}], tmp_path)
    assert (row["answer"], row["x"]) == (0.5, [0, 1])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "data is empty"),
        (["text"], r"data\[0\] is a str"),
        (
            [{"prompt": "a", "answer": "b"}, {"question": "c"}],
            r"data\[1\] has no column 'prompt' or 'messages'",
        ),
        ([{"prompt": "a", "x": object()}], r"data\[0\]: column 'x' is of type object, which JSON cannot hold"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], r"data\[0\] has the column 'chosen'.*interlace train dpo"),
        ([{"chosen": "ab", "rejected": "ac"}], r"data\[0\] has the column 'chosen'.*interlace train dpo"),
        ([{"prompt": "a", "completion": "b"}], r"data\[0\] has the column 'completion'.*interlace train sft"),
        ([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], "the recipe 'sft'"),
        ({"train": [], "test": []}, r"give one split of it, such as data\['train'\]"),
        (3, "data is of type int: give a file"),
    ],
)
def test_a_mistake_names_the_row(tmp_path: Path, rows: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        written(rows, tmp_path)


def test_a_solved_conversation_may_stand_beside_the_prompt(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows = [{"prompt": "1+1", "answer": "2", "messages": chat}]
    assert written(rows, tmp_path) == rows


def test_a_mapped_column_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\[0\] has no column 'reward_model.truth'.*Did you mean 'ground_truth'"):
        written([NESTED], tmp_path, {"prompt": "question", "answer": "reward_model.truth"})


def test_a_later_error_names_the_row_and_not_the_file(tmp_path: Path) -> None:
    path, other = tmp_path / "0123.jsonl", tmp_path / "4567.jsonl"
    words = r"^data\['a'\]\[2\]: bad, and data\['b'\]\[0\] too$"
    with pytest.raises(UserError, match=words), rows_by_place({path: "data['a']", other: "data['b']"}):
        raise UserError(f"{path}:3: bad, and row train/{other.name}:1 too")
    with pytest.raises(UserError, match=r"^0123\.jsonl:3: bad$"), rows_by_place({path: "data"}):
        raise UserError(f"{path.name}:3: bad")  # another file of the user
