"""The real client of the hub uploads an export to a stand-in of the hub's routes; mistakes end before any upload."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

import interlace
from tests.support.library import ROWS, TINY

pytest.importorskip("aiohttp")
pytest.importorskip("peft")
from tests.support.hub_server import READER, WRITER, Hub, Repository, open_hub
from tests.support.training import REPOSITORY


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> interlace.TrainedRun:
    return interlace.train(
        model="tiny:micro", data=ROWS, reward="exact", heldout_size=2, name="mine", quiet=True,
        actor={"lora": {"rank": 4}}, folder=tmp_path_factory.mktemp("runs"), logging={"loggers": []}, **TINY,
    )  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yields a hub to which the client of this process uploads by git LFS. The current folder is the test's."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_TOKEN": WRITER, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with open_hub() as served:
        # The client has read its environment when it was imported.
        for name, setting in {"ENDPOINT": served.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, setting)
        close_session()
        yield served
    close_session()


def export_by_command(endpoint: str, folder: Path, *arguments: str) -> str:
    """Exports by the command, whose environment selects the hub. Returns its output."""
    environment = {
        **os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": WRITER,
        "HF_HOME": str(folder / "home"), "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "interlace", "export", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(run: interlace.TrainedRun, name: str, token: str = WRITER) -> str:
    with pytest.raises(interlace.UserError) as caught:
        run.push_to_hub(name, token=token)
    return str(caught.value)


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_file_of_an_export_arrives(run: interlace.TrainedRun, hub: Hub, tmp_path: Path) -> None:
    addresses = [run.export("hub:me/mine", merge=False) for _ in range(2)]
    assert run.export("alone", merge=False) and run.export("whole")
    addresses += [run.export("hub:me/alone", merge=False), run.push_to_hub("me/mine")]
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
    shown = export_by_command(hub.url, tmp_path, str(run.folder), "--to", "hub:me/mine", "--public")
    assert f"{hub.url}/me/mine" in shown.replace("\n", " ")
    assert hub.repositories["model", "me/mine"].visibility == "public"
    assert hub.repositories["dataset", "me/mine"].files == {"rows.jsonl": b"{}"}, "a data set has names of its own"


def test_mistakes(run: interlace.TrainedRun, hub: Hub) -> None:
    hub.repositories["model", "me/other"] = Repository(files={"model.gguf": b"GGUF", "README.md": b"---\n{}\n---\n"})
    wrong, reader = refusal(run, "me/mine", "hf_wrong"), refusal(run, "me/mine", READER)
    theirs, other, nameless = (refusal(run, name) for name in ("them/mine", "me/other", "mine"))
    assert "the hub refuses the token (" in wrong and "`hf auth login`, HF_TOKEN or token=..." in wrong
    assert "the token may not write there (You don't have the rights to create a model" in reader
    assert "the token may not write there" in theirs and "'them/mine'" in theirs
    assert "'me/other' is a repository with another model (model.gguf)" in other and "Choose another name" in other
    assert "write hub:OWNER/NAME" in nameless
    assert [*hub.repositories] == [("model", "me/other")] and len(hub.repositories["model", "me/other"].files) == 2


def test_a_hub_that_cannot_be_reached(run: interlace.TrainedRun, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_hub() as ended:
        url = ended.url
    monkeypatch.setattr(constants, "ENDPOINT", url)
    told = refusal(run, "me/mine")
    assert f"{url} cannot be reached" in told and "export to a folder" in told
