"""Every kind of table gives the same rows."""

import gzip
import json
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.data.config import HubSource
from interlace.data.loading import read_hub
from interlace.data.tables import read_rows, read_table

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": 'a, "b"\nc', "answer": "é"}]


def rows(path: Path) -> list[dict[str, object]]:
    return [dict(values) for _, values in read_table(str(path))]


def test_json_csv_and_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "b.json").write_text(json.dumps({"data": ROWS}))
    (tmp_path / "a.csv").write_text('\ufeffprompt,answer\n1+1,2\n"a, ""b""\nc",é\n', encoding="utf-8")
    (tmp_path / "a.tsv").write_text("prompt\tanswer\n1+1\t2\n", encoding="utf-8")
    assert rows(tmp_path / "a.json") == rows(tmp_path / "b.json") == rows(tmp_path / "a.csv") == ROWS
    assert rows(tmp_path / "a.tsv") == ROWS[:1]


def test_a_cell_of_a_csv_file_may_be_a_long_document(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,answer\n{'x' * 200_000},1\n")
    assert rows(tmp_path / "a.csv") == [{"prompt": "x" * 200_000, "answer": "1"}]


def test_a_json_file_may_have_a_row_on_each_line(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).to_json(tmp_path / "a.json")
    assert rows(tmp_path / "a.json") == ROWS
    (tmp_path / "b.json").write_text(json.dumps({"data": ROWS}, indent=1))
    assert rows(tmp_path / "b.json") == ROWS


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", "{}", "holds a list of objects"),
        ("a.json", "[1]", "item 1 is a int"),
        ("a.csv", "a,b\n1\n", "a.csv:2: 1 cells, and the header has 2"),
        ("a.csv", "a,a\n1,2\n", "two columns have the name 'a'"),
        ("a.csv", "prompt;answer\n1+1;2\n", "its names seem to be separated by ';'"),
        ("a.tsv", "prompt,answer\n1+1,2\n", "its names seem to be separated by ','"),
        ("a.csv", "a,b\n", "is empty"),
        ("a.csv", 'a,b\n"1"x,2\n', "not CSV"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        rows(tmp_path / name)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """A row would have the last one alone, so that a run trained on another prompt."""
    pyarrow, pandas = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")
    from pyarrow import parquet

    names, cells = ["prompt", "prompt"], ["1+1", "2+2"]
    table = pyarrow.Table.from_arrays([pyarrow.array([cell]) for cell in cells], names=names)
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet: two columns have the name 'prompt'"):
        rows(tmp_path / "a.parquet")
    for data in (table, pandas.DataFrame([cells], columns=names)):
        with pytest.raises(UserError, match=r"^data: two columns have the name 'prompt'"):
            read_rows(data)


def test_a_damaged_file_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    from pyarrow import parquet

    texts = [f"{number} and {number}" for number in range(1000)]
    parquet.write_table(pyarrow.table({"prompt": texts}), tmp_path / "page.parquet", compression="zstd")
    content = bytearray((tmp_path / "page.parquet").read_bytes())
    content[40:400] = bytes(360)
    (tmp_path / "page.parquet").write_bytes(content)
    doubled = pyarrow.array([[("k", "1"), ("k", "2")]], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    parquet.write_table(pyarrow.table({"prompt": ["a"], "m": doubled}), tmp_path / "map.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"--")
    for name in ("page.parquet", "map.parquet", "saved", "x" * 300 + ".jsonl"):
        with pytest.raises(UserError, match="cannot be read"):
            rows(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_another_encoding_is_named_with_the_way_to_utf8(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"is not UTF-8 text: byte 0xe9 .* Save the file as UTF-8"):
        rows(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "encoded", "words"),
    [
        ("a.csv", "prompt,answer\nq,a\n".encode("utf-16"), "iconv -f UTF-16"),
        ("a.jsonl", '{"prompt": "q"}\n{"prompt": "r"}\n'.encode("utf-16"), "iconv -f UTF-16"),
        ("a.csv", gzip.compress(b"prompt,answer\nq,a\n"), "compressed by gzip.*gunzip"),
        ("a.jsonl", gzip.compress(b'{"prompt": "q"}\n'), "compressed by gzip.*gunzip"),
    ],
)
def test_the_advice_for_a_file_that_is_not_utf8_fits_its_first_bytes(
    tmp_path: Path, name: str, encoded: bytes, words: str
) -> None:
    """A conversion from LATIN1 would write other rows without an error."""
    (tmp_path / name).write_bytes(encoded)
    with pytest.raises(UserError, match=words):
        rows(tmp_path / name)


def test_empty_lines_before_the_header_of_a_csv_file_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf\r\n\r\nprompt,answer\r\n\r\nq,a\r\n")
    assert rows(tmp_path / "a.csv") == [{"prompt": "q", "answer": "a"}]
    (tmp_path / "a.csv").write_text("\n\nprompt;answer\nq;a\n")
    with pytest.raises(UserError, match=r"a\.csv:3: the header"):
        rows(tmp_path / "a.csv")


def test_a_folder_that_datasets_saved_and_one_of_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": made, "train": made}).save_to_disk(str(tmp_path / "splits"))
    assert rows(tmp_path / "one") == rows(tmp_path / "splits" / "train") == ROWS
    with pytest.raises(UserError, match=r"holds the splits test, train: name one, such as .*splits/test"):
        rows(tmp_path / "splits")


def test_objects_of_a_program() -> None:
    pandas, pyarrow, datasets = (pytest.importorskip(name) for name in ("pandas", "pyarrow", "datasets"))
    objects = (
        ROWS, iter(ROWS), pandas.DataFrame(ROWS), pyarrow.Table.from_pylist(ROWS), datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    )  # fmt: skip
    for given in objects:
        assert list(read_rows(given)) == ROWS, type(given)


def test_objects_that_are_no_rows() -> None:
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    for given, sentence in (
        (splits, r"data is a mapping of 'train': give one split of it, such as data\['train'\]"),
        ({"prompt": "a"}, "one mapping: give a list of rows"),
        ({"prompt": ["a"], "answer": ["b"]}, "a mapping of 'prompt', 'answer': give a list of rows"),
        (3, "data is of type int: give a file"),
    ):
        with pytest.raises(UserError, match=sentence):
            read_rows(given)


def test_a_data_set_of_the_hub_is_read_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads a folder of files as it reads the hub; only the fetch differs."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("interlace.data.loading._check_reach", lambda name: None)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 3))
    name = str(tmp_path / "set")
    for streaming in (False, True):
        source = HubSource(name=name, streaming=streaming, limit=4)
        assert [dict(values) for _, values in read_hub(source, "train")] == (ROWS * 2)
        assert list(read_hub(source, "heldout")) == []
    with pytest.raises(UserError, match=r"split 'tets' cannot be loaded: .*tets"):
        list(read_hub(HubSource(name=name, split="tets"), "train"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_hub_with_other_columns_in_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("interlace.data.loading._check_reach", lambda name: None)
    (tmp_path / "set").mkdir()
    for name in ("answer", "solution"):
        (tmp_path / "set" / f"{name}.jsonl").write_text(json.dumps({"prompt": "1+1", name: "2"}) + "\n")
    with pytest.raises(UserError, match=r"task.hub.name = .* cannot be loaded: .*column"):
        list(read_hub(HubSource(name=str(tmp_path / "set"), streaming=streaming, limit=4), "train"))


def test_a_hub_that_cannot_be_reached_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("interlace.core.hub.getproxies", dict)
    with pytest.raises(UserError, match=r"data set 'openai/gsm8k': http://127.0.0.1:9 cannot be reached"):
        list(read_hub(HubSource(name="openai/gsm8k"), "train"))
