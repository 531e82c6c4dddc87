"""The real client of the hub uploads an export to a stand-in of the hub's routes; mistakes end before any upload."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import interlace
from tests.support.library import ROWS, TINY

pytest.importorskip("aiohttp")
pytest.importorskip("peft")
from tests.support.hub_server import READER, WRITER, Hub, Repository, open_hub

ROOT = Path(__file__).parents[2]
UPLOAD = """
import sys, interlace
run = interlace.load_run(sys.argv[1])
print(run.export("hub:me/mine", merge=False))
print(run.export("hub:me/mine", merge=False))
assert run.export("alone", merge=False) and run.export("whole")
print(run.export("hub:me/alone", merge=False))
print(run.push_to_hub("me/mine"))
"""
MISTAKES = """
import sys, interlace
run = interlace.load_run(sys.argv[1])
for name, token in [each.split("=") for each in sys.argv[2:]]:
    try:
        print("uploaded to", run.push_to_hub(name, token=token))
    except interlace.UserError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> interlace.TrainedRun:
    return interlace.train(
        model="tiny:micro", data=ROWS, reward="exact", heldout_size=2, name="mine", quiet=True,
        actor={"lora": {"rank": 4}}, folder=tmp_path_factory.mktemp("runs"), logging={"loggers": []}, **TINY,
    )  # fmt: skip


@pytest.fixture
def hub() -> Iterator[Hub]:
    with open_hub() as served:
        yield served


def call(endpoint: str, folder: Path, *arguments: str) -> list[str]:
    """Runs Python with a client that uploads to the endpoint by git LFS. Returns the lines of its output."""
    environment = {
        **os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": WRITER,
        "HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_file_of_an_export_arrives(run: interlace.TrainedRun, hub: Hub, tmp_path: Path) -> None:
    addresses = call(hub.url, tmp_path, "-c", UPLOAD, str(run.folder))
    assert addresses == [f"{hub.url}/me/{name}" for name in ("mine", "mine", "alone", "mine")]
    alone, mine = (hub.repositories["model", f"me/{name}"] for name in ("alone", "mine"))
    written = read_files(tmp_path / "alone")
    assert sorted(alone.files) == sorted(written)
    assert [path for path in written if alone.files[path] != written[path]] == []
    assert alone.lfs_paths == {"adapter_model.safetensors", "base/model.safetensors"}
    assert {"README.md", "tokenizer.json", "adapter_config.json", "base/config.json"} <= set(alone.files)
    # The merged model replaced the adapter that was uploaded before: loaders would take an adapter that is left.
    written = read_files(tmp_path / "whole")
    assert sorted(mine.files) == sorted(written)
    assert [path for path in written if mine.files[path] != written[path]] == []
    assert mine.lfs_paths == {"model.safetensors"} and mine.visibility == "private"
    assert mine.messages == ["Model of run mine"] * 2, "an upload without a change makes no commit"


def test_the_command_uploads(run: interlace.TrainedRun, hub: Hub, tmp_path: Path) -> None:
    hub.repositories["dataset", "me/mine"] = Repository(files={"rows.jsonl": b"{}"})
    lines = call(hub.url, tmp_path, "-m", "interlace", "export", str(run.folder), "--to", "hub:me/mine", "--public")
    assert f"{hub.url}/me/mine" in " ".join(lines)
    assert hub.repositories["model", "me/mine"].visibility == "public"
    assert hub.repositories["dataset", "me/mine"].files == {"rows.jsonl": b"{}"}, "a data set has names of its own"


def test_mistakes(run: interlace.TrainedRun, hub: Hub, tmp_path: Path) -> None:
    hub.repositories["model", "me/other"] = Repository(files={"model.gguf": b"GGUF", "README.md": b"---\n{}\n---\n"})
    attempts = ("me/mine=hf_wrong", f"me/mine={READER}", f"them/mine={WRITER}", f"me/other={WRITER}", f"mine={WRITER}")
    wrong, reader, theirs, other, nameless = call(hub.url, tmp_path, "-c", MISTAKES, str(run.folder), *attempts)
    assert "the hub refuses the token (" in wrong and "`hf auth login`, HF_TOKEN or token=..." in wrong
    assert "the token may not write there (You don't have the rights to create a model" in reader
    assert "the token may not write there" in theirs and "'them/mine'" in theirs
    assert "'me/other' is a repository with another model (model.gguf)" in other and "Choose another name" in other
    assert "write hub:OWNER/NAME" in nameless
    assert [*hub.repositories] == [("model", "me/other")] and len(hub.repositories["model", "me/other"].files) == 2


def test_a_hub_that_cannot_be_reached(run: interlace.TrainedRun, tmp_path: Path) -> None:
    with open_hub() as hub:
        url = hub.url
    [told] = call(url, tmp_path, "-c", MISTAKES, str(run.folder), f"me/mine={WRITER}")
    assert f"{url} cannot be reached" in told and "export to a folder" in told
