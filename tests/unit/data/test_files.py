"""Files give rows, and each mistake in a file gives one clear sentence."""

import json
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.data.config import FileSource
from interlace.data.loading import table_rows

GOOD = {"prompt": "1+1", "answer": 2, "level": "easy"}


def write(folder: Path, *lines: str, name: str = "set.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def refusal(path: Path | str, **columns: str | None) -> str:
    with pytest.raises(UserError) as caught:
        table_rows(FileSource(train=str(path)), "train", columns)
    return str(caught.value)


def test_columns_become_prompt_answer_and_metadata(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(GOOD), "", json.dumps({"prompt": "é", "answer": "x"}))
    first, second = table_rows(FileSource(train=str(path)), "train")
    assert (first.prompt, first.answer, first.metadata) == ("1+1", "2", {"level": "easy", "answer": 2})
    assert (second.prompt, second.answer, second.origin) == ("é", "x", f"{path}:3")
    assert first.uid == "train/set.jsonl:1"


def test_an_answer_that_is_no_text_is_what_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, *(f'{{"prompt": "?", "answer": {answer}}}' for answer in ("true", "-3", "2.50")))
    assert [row.answer for row in table_rows(FileSource(train=str(path)), "train")] == ["true", "-3", "2.5"]


def test_other_column_names(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"question": "q", "solution": "s", "prompt": "p"}))
    (row,) = table_rows(FileSource(train=str(path)), "train", {"prompt": "question", "answer": "solution"})
    assert (row.prompt, row.answer) == ("q", "s")
    assert row.metadata == {"prompt": "p", "question": "q", "solution": "s"}


def test_parquet_is_read_like_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "set.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([GOOD, {**GOOD, "prompt": "2+2", "answer": 4}]), path)
    rows = table_rows(FileSource(train=str(path)), "train")
    assert [(row.prompt, row.answer, row.metadata["level"]) for row in rows] == [
        ("1+1", "2", "easy"),
        ("2+2", "4", "easy"),
    ]
    assert "set.parquet:1: there is no column 'solution'" in refusal(path, answer="solution")


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(GOOD), '{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}")
    assert f"{path}:2: brackets within brackets" in refusal(path)


def test_each_mistake_names_file_and_line(tmp_path: Path) -> None:
    good = json.dumps(GOOD)
    assert f"{tmp_path}/set.jsonl:2: not JSON" in refusal(write(tmp_path, good, "{prompt: 1}"))
    assert "set.jsonl:2: a list; each line must be a JSON object" in refusal(write(tmp_path, good, "[1]"))
    missing = refusal(write(tmp_path, good, '{"prompt": "1", "anwser": "2"}'))
    assert (
        "set.jsonl:2: there is no column 'answer'. Did you mean 'anwser'? Then set task.columns.answer=anwser."
        in missing
    )
    assert "set.jsonl:1: column 'answer' is null" in refusal(write(tmp_path, '{"prompt": "1", "answer": null}'))
    assert "set.jsonl:1: column 'answer' is NaN, which JSON cannot hold" in refusal(
        write(tmp_path, '{"prompt": "1", "answer": NaN}')
    )
    assert "set.jsonl:1: column 'prompt' is a int" in refusal(write(tmp_path, '{"prompt": 1, "answer": "1"}'))


@pytest.mark.parametrize("row", ['{"prompt": "1", "answer": "1", "answer": "2"}', '{"meta": {"a": 1, "a": 2}}'])
def test_a_key_that_an_object_has_twice_is_refused(tmp_path: Path, row: str) -> None:
    assert "set.jsonl:2: an object has the key 'a" in refusal(write(tmp_path, json.dumps(GOOD), row))
    path = tmp_path / "set.json"
    path.write_text(f"[{row}]")
    assert "set.json: an object has the key 'a" in refusal(path)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]


@pytest.mark.parametrize("column", ["prompt", "messages"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_chat_is_read_with_its_history(tmp_path: Path, column: str, kind: str) -> None:
    values = {column: CHAT, "answer": "4", "level": "easy"}
    path = tmp_path / f"set.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([values]), path)
    else:
        write(tmp_path, json.dumps(values))
    (row,) = table_rows(FileSource(train=str(path)), "train")
    assert [(message.role, message.content) for message in row.messages] == [
        (message["role"], message["content"]) for message in CHAT
    ]
    assert (row.prompt, row.answer, row.metadata) == ("2+2?", "4", {"level": "easy", "messages": CHAT})


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "is an empty list"),
        (["1+1?"], "message 1 is '1+1?': write {role: user, content: text}"),
        ([{"role": "human", "content": "?"}], "message 1 has the role 'human'; the roles are system, user"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "message 1 has a part of type 'image' in its content: only text",
        ),
        (CHAT[:3], "ends with a message of the assistant"),
        (CHAT[:1], "ends with the system message"),
        ([CHAT[1], CHAT[0], CHAT[1]], "message 2 is a system message after others"),
        ([CHAT[1], {"role": "tool", "content": "4"}], "message 2 is the result of a tool, and the message before it"),
        ([CHAT[1], CHAT[2], CHAT[2], CHAT[1]], "message 3 and the one before are of the assistant"),
    ],
)
def test_what_is_no_chat_is_named(tmp_path: Path, messages: object, sentence: str) -> None:
    said = refusal(write(tmp_path, json.dumps({"prompt": messages, "answer": "2"})))
    assert said.startswith(f"{tmp_path / 'set.jsonl'}:1: column 'prompt'") and sentence in said


def test_text_that_is_not_utf8_is_named_too(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff", "answer": "1"}\n')
    assert "set.jsonl:2 is not UTF-8 text" in refusal(path)


def test_files_that_are_empty_missing_or_of_another_kind(tmp_path: Path) -> None:
    assert "is empty" in refusal(write(tmp_path))
    assert "is empty" in refusal(write(tmp_path, "", "  "))
    assert "does not exist" in refusal(tmp_path / "none.jsonl")
    assert "is a folder, and not one that save_to_disk() of `datasets` wrote" in refusal(tmp_path)
    assert "is not one of .jsonl, .json, .csv" in refusal(write(tmp_path, "a", name="set.txt"))
    pytest.importorskip("pyarrow")
    assert "is not a Parquet file" in refusal(write(tmp_path, "a", name="set.parquet"))
