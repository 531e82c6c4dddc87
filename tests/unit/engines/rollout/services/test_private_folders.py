"""The private folder of a server, which contains a whole model, is removed if its run was killed without a guard."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from interlace.engines.rollout.kinds import base
from interlace.engines.rollout.services.lease import (
    OWNER,
    ServerLease,
    hold_folder,
    release_folder,
    remove_private_folder,
    remove_unused_folders,
)
from interlace.engines.rollout.services.process import ServerProcess
from tests.support.killed_servers import close_servers, kill_run

HOLD = """
import time
from interlace.engines.rollout.kinds import base
base.LONGEST_PARENT = 1000
print(base.make_private_folder(), flush=True)
time.sleep(600)
"""


GUARDS = """
import sys
from interlace.engines.rollout.services import guard
guard.LOCK_S = 60.0
print("begins", flush=True)
sys.exit(guard.main(*sys.argv[1:]))
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(base, "LONGEST_PARENT", 1000)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_whose_run_was_killed_before_the_start_of_its_server_is_removed(temporary: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        left = Path(run.stdout.readline().strip())
        first = base.make_private_folder()
        assert left.exists()
        run.kill()
    os.utime(left, (0, 0))
    second = base.make_private_folder()
    assert not left.exists() and first.exists() and second.exists()
    for folder in (first, second):
        release_folder(folder)
        os.utime(folder, (0, 0))
    remove_unused_folders(temporary, base.PRIVATE)
    assert not first.exists() and not second.exists()


def test_a_folder_is_not_removed_between_the_creation_and_the_lock_of_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "server-new"
    folder.mkdir()
    (folder / OWNER).touch()
    remove_unused_folders(tmp_path, "server-")
    assert folder.exists()
    os.utime(folder, (0, 0))
    remove_unused_folders(tmp_path, "server-")
    assert not folder.exists()


def test_the_remains_of_an_interrupted_removal_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed if the file of their run was removed before the model."""
    folder = tmp_path / "server-left"
    (folder / "model").mkdir(parents=True)
    (folder / "model/weights").touch()
    hold_folder(folder)
    release_folder(folder)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            remove_private_folder(folder)
    assert (folder / OWNER).exists()
    os.utime(folder, (0, 0))
    remove_unused_folders(tmp_path, "server-")
    assert not folder.exists()


def raise_interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_folder_that_another_process_has_locked_is_not_held(tmp_path: Path) -> None:
    with (tmp_path / OWNER).open("w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            hold_folder(tmp_path)


def test_a_folder_of_another_program_stays(tmp_path: Path) -> None:
    folder = tmp_path / "server-notes"
    folder.mkdir()
    (folder / "text").touch()
    os.utime(folder, (0, 0))
    remove_unused_folders(tmp_path, "server-")
    assert (folder / "text").exists()


def test_a_folder_of_a_guard_or_of_a_run_that_is_about_to_lock_it_stays(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's folders are too deep for a socket file
    killed = kill_run(tmp_path / "rollout-0.json", folder, 600.0)
    os.utime(folder, (0, 0))
    remove_unused_folders(folder.parent, folder.name)
    assert folder.exists()
    server = killed.adopt()
    assert isinstance(server, ServerProcess)
    server.stop()
    assert killed.has_ended()
    os.utime(folder, (0, 0))
    remove_unused_folders(folder.parent, folder.name)
    assert folder.exists(), "the run may start its server again"
    server.remove_files()
    folder.mkdir()
    remove_unused_folders(folder.parent, folder.name)
    assert folder.exists(), "it is new"
    os.utime(folder, (0, 0))
    remove_unused_folders(folder.parent, folder.name)
    assert not folder.exists()
    close_servers(killed)


def test_a_guard_locks_a_folder_that_a_run_has_locked_briefly(tmp_path: Path) -> None:
    lease = ServerLease(seconds=0.0, record=tmp_path / "rollout-0.json", folder=tmp_path / "server")
    lease.folder.mkdir()
    lock = lease.lock()
    assert lock is not None
    serves = "import time; print('serves', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", GUARDS, "0", str(lease.record), str(lease.folder), "-c", serves]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as guard:
        assert guard.stdin and guard.stdout and guard.stdout.readline() == "begins\n"
        time.sleep(0.5)
        os.close(lock)
        assert guard.stdout.readline() == "serves\n"
        assert lease.lock() is None
        guard.stdin.close()
