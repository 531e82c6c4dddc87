"""Only one process at a time holds a run's folder."""

import errno
import fcntl
import multiprocessing
import os
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_lock import RunLock, is_held, is_supported, open_run, resume_run
from interlace.run.recipe.config import Recipe
from interlace.run.sweep_run import prepare_run

pytestmark = pytest.mark.skipif(not is_supported(), reason="this system has no file locks")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


def hold(path: Path, together: Barrier, end: Connection, told: Connection) -> None:
    together.wait(60)
    try:
        with RunLock(RunFolder(path=path)):
            told.send(os.getpid())
            end.recv()
    except UserError as error:
        told.send(str(error))


def test_of_processes_that_start_at_once_one_holds_the_run(folder: RunFolder) -> None:
    spawn = multiprocessing.get_context("spawn")
    together, told = spawn.Barrier(3), [spawn.Pipe() for _ in range(3)]
    ends = [spawn.Pipe() for _ in range(3)]
    processes = [
        spawn.Process(target=hold, args=(folder.path, together, ends[number][0], told[number][1]))
        for number in range(3)
    ]
    for process in processes:
        process.start()
    answers = [mine.recv() for mine, _ in told]
    for _, end in ends:
        end.send(None)
    for process in processes:
        process.join(60)
    holders = [answer for answer in answers if isinstance(answer, int)]
    refused = [answer for answer in answers if isinstance(answer, str)]
    assert len(holders) == 1 and len(refused) == 2
    assert all("'run' is being trained by" in text and "--name" in text for text in refused)


def test_a_run_that_is_resumed_is_held_until_the_end(folder: RunFolder, tmp_path: Path) -> None:
    folder.config.touch()
    with ExitStack() as held:
        assert resume_run(tmp_path, "run", "", held=held).path == folder.path
        with pytest.raises(UserError, match="'run' is being trained by"):
            RunLock(folder).__enter__()
    with RunLock(folder):
        pass


def test_who_holds_it_is_named(folder: RunFolder) -> None:
    with RunLock(folder), pytest.raises(UserError, match=rf"by process {os.getpid()} on {os.uname().nodename}"):
        RunLock(folder).__enter__()
    with RunLock(folder):
        pass
    assert not folder.process.exists()


def test_a_sweep_does_not_delete_a_run_that_another_one_trains(folder: RunFolder) -> None:
    recipe = Recipe.parse(
        {"model": "tiny:micro", "task": "number_sorting", "reward": "reasoning_gym", "steps": 1,
         "prompts_per_step": 1, "samples_per_prompt": 2}
    )  # fmt: skip
    with RunLock(folder), pytest.raises(UserError, match="is being trained by process"):
        prepare_run(folder.path, recipe)
    assert folder.samples.is_dir()


def test_what_a_killed_process_left_is_no_lock(folder: RunFolder) -> None:
    folder.process.write_text(f'{{"pid": {os.getpid()}, "host": "{os.uname().nodename}"}}')
    with RunLock(folder):
        pass


def test_a_lock_on_a_file_that_was_removed_meanwhile_counts_for_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, before = fcntl.flock, []

    def is_removed_first(file: int, operation: int) -> None:
        if not before:
            before.append(file)
            folder.process.unlink()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", is_removed_first)
    with RunLock(folder), pytest.raises(UserError, match="is being trained"):
        RunLock(folder).__enter__()


def test_a_file_system_without_locks_is_refused(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", has_none)
    with pytest.raises(UserError, match=r"cannot lock .*process.json: No locks available.*mix"):
        RunLock(folder).__enter__()


def test_a_folder_of_a_command_that_was_stopped_before_it_wrote_a_file_is_taken_over(tmp_path: Path) -> None:
    """Neither `train` nor `--resume` accepted it."""
    with ExitStack() as held:
        open_run(tmp_path, "mine", "quickstart", overwrite=False, held=held)
        with pytest.raises(UserError, match="is being trained by"):
            open_run(tmp_path, "mine", "quickstart", overwrite=False, held=held)
    with ExitStack() as held:
        folder = open_run(tmp_path, "mine", "quickstart", overwrite=False, held=held)
    folder.config.write_text("steps: 1\n", encoding="utf-8")
    with ExitStack() as held, pytest.raises(UserError, match="exists already"):
        open_run(tmp_path, "mine", "quickstart", overwrite=False, held=held)


def make_run(root: Path) -> RunFolder:
    folder = RunFolder.create(root, "mine")
    folder.config.write_text("steps: 1\n", encoding="utf-8")
    folder.metrics.write_text("{}\n", encoding="utf-8")
    return folder


def test_a_run_is_replaced_only_after_a_step_of_the_new_one(tmp_path: Path) -> None:
    """A run that failed at its start lost the earlier one."""
    earlier = make_run(tmp_path)

    def replace(*, has_trained: bool) -> None:
        with ExitStack() as held:
            new = open_run(tmp_path, "mine", "quickstart", overwrite=True, held=held)
            assert is_held(new) and not new.metrics.exists() and new.replaced.is_dir()
            new.config.write_text("steps: 2\n", encoding="utf-8")
            if has_trained:
                new.metrics.write_text("{}\n", encoding="utf-8")
                new.delete_replaced()

    for _ in range(2):
        replace(has_trained=False)
        assert earlier.config.read_text() == "steps: 1\n" and earlier.has_trained and is_held(earlier) is None
        assert (earlier.failed / "config.yaml").read_text() == "steps: 2\n", "its logs, which its error names, are gone"
    replace(has_trained=True)
    assert earlier.config.read_text() == "steps: 2\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_replacement_that_was_killed_before_its_first_step_leaves_the_earlier_run(tmp_path: Path) -> None:
    earlier = make_run(tmp_path)
    killed = ExitStack()
    open_run(tmp_path, "mine", "quickstart", overwrite=True, held=killed).config.write_text("steps: 2\n")
    killed.pop_all()
    earlier.process.unlink()
    with ExitStack() as held:
        open_run(tmp_path, "mine", "quickstart", overwrite=True, held=held)
    assert earlier.config.read_text() == "steps: 1\n" and earlier.has_trained
