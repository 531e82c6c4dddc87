"""Damage to any file of a folder is detected and the file is named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from interlace.observe.checkpoints import MANIFEST, find_damage, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "tensors").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "state.json").write_text('{"step": 4}')
    (tmp_path / "empty").write_bytes(b"")
    write_manifest(tmp_path)
    return tmp_path


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_what_was_not_touched_is_whole(folder: Path) -> None:
    assert find_damage(folder) is None
    (folder / "notes.txt").write_text("the user's own")
    assert find_damage(folder) is None


@pytest.mark.parametrize("bit", [0, 7, 100_000, 204_799])
def test_one_bit_is_noticed(folder: Path, bit: int) -> None:
    flip(folder / "deep" / "tensors", bit)
    assert find_damage(folder) == "has other content than was written in deep/tensors"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "state.json").write_text("{"), "has state.json with 1 of 11 bytes"),
        (lambda folder: (folder / "empty").unlink(), "lacks empty"),
        (lambda folder: (folder / MANIFEST).unlink(), "has no manifest.json"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "has a damaged manifest.json"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), "has a damaged manifest.json"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe"), "has a damaged manifest.json"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(folder)
    assert str(find_damage(folder)).startswith(said)
