"""A server of a killed run is adopted by the engine at its place, which may have another number."""

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from interlace.engines.rollout.services.adoption import ServerRecord, end_unused_servers, move_servers, write_record
from interlace.engines.rollout.services.lease import POLL_S, ServerLease, record_file
from interlace.engines.rollout.services.process import ServerCommand, ServerProcess, find_guards
from interlace.engines.rollout.services.protocol import Address
from tests.support.killed_servers import Killed, close_servers, kill_run


@pytest.fixture
def two_killed(tmp_path: Path) -> Iterator[list[Killed]]:
    """Two servers of a killed run. The place of each has the name of its record."""
    folders = [Path(tempfile.mkdtemp()) for _ in range(2)]
    found = [kill_run(record_file(tmp_path, number), folder, 600.0) for number, folder in enumerate(folders)]
    yield found
    for one, folder in zip(found, folders, strict=True):
        close_servers(one)
        shutil.rmtree(folder, ignore_errors=True)


def adopt_moved(two_killed: list[Killed], moved: dict[int, int]) -> None:
    """Adopts servers, after a wait in which a server without a record would end.

    moved: the number of each server's engine, by its number before.
    """
    folder = two_killed[0].record.parent
    time.sleep(4 * POLL_S)
    assert sorted(find_guards(folder).values()) == sorted(moved.values())
    for before, now in moved.items():
        server = two_killed[before].adopt(record=record_file(folder, now))
        assert isinstance(server, ServerProcess) and server.fault() is None
        assert server.lease.folder == two_killed[before].folder
        assert server.log == two_killed[before].record.with_suffix(".log")
        server.stop()
        assert two_killed[before].has_ended()
        server.start()
        assert server.log == two_killed[before].record.with_suffix(".log")
        server.stop()


@pytest.mark.parametrize(
    ("places", "moved", "num_ended"),
    [
        ({0: "rollout-1", 1: "rollout-0"}, {0: 1, 1: 0}, 0),
        ({0: "rollout-1", 1: "rollout-1"}, {1: 1}, 0),
        ({0: "rollout-1"}, {1: 0}, 1),
        ({0: "new", 2: "rollout-0", 3: "rollout-1"}, {0: 2, 1: 3}, 0),
    ],
)
def test_a_server_is_adopted_by_the_engine_at_its_place(
    two_killed: list[Killed], places: dict[int, str], moved: dict[int, int], num_ended: int
) -> None:
    """Engines have other numbers if the resumed run has other devices, or if Ray lists its nodes in another order."""
    folder = two_killed[0].record.parent
    assert len(move_servers(folder, places)) == num_ended
    end_unused_servers(folder, moved.values())
    assert all(two_killed[number].has_ended() for number in {0, 1} - moved.keys())
    adopt_moved(two_killed, moved)


def test_no_two_servers_write_to_one_log(tmp_path: Path) -> None:
    """A server that moved writes to the log with the number that it had. A new one for this number wrote to it too."""
    command, address = ServerCommand(arguments=()), Address(url="http://127.0.0.1:9")

    def write(number: int, name: str) -> Path:
        lease = ServerLease(seconds=600.0, record=record_file(tmp_path, number), folder=tmp_path / name)
        log = write_record(lease, address, command, "model", place=name)
        assert ServerProcess(command, address, lease).log == log
        return log

    assert write(1, "first") == tmp_path / "rollout-1.log"
    assert move_servers(tmp_path, {0: "first"}) == []
    assert write(1, "second") == tmp_path / "rollout-1.1.log"
    assert write(2, "third") == tmp_path / "rollout-2.log"


@pytest.mark.parametrize("num_changes", range(6))
def test_servers_keep_records_if_a_process_is_killed_while_it_renames_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_changes: int
) -> None:
    """num_changes: files that the process removes or renames before it is killed."""
    command, address = ServerCommand(arguments=()), Address(url="http://127.0.0.1:9")
    for number in range(2):
        lease = ServerLease(seconds=600.0, record=record_file(tmp_path, number), folder=tmp_path / f"server-{number}")
        write_record(lease, address, command, "model", place=f"place-{number}")
    places, changes = {0: "place-1", 1: "place-0"}, iter(range(num_changes))

    def kill_after_changes(change: Callable[..., object]) -> Callable[..., object]:
        def count(*given: Any, **options: Any) -> object:
            if next(changes, None) is None:
                raise KeyboardInterrupt
            return change(*given, **options)

        return count

    with monkeypatch.context() as patched:
        for name in ("unlink", "replace"):
            patched.setattr(Path, name, kill_after_changes(getattr(Path, name)))
        with pytest.raises(KeyboardInterrupt):
            move_servers(tmp_path, places)
    move_servers(tmp_path, places)
    assert sorted(tmp_path.glob("*.json")) == [record_file(tmp_path, number) for number in range(2)]
    for number in range(2):
        record = ServerRecord.model_validate_json(record_file(tmp_path, number).read_text())
        assert record.folder == str(tmp_path / f"server-{1 - number}") and record.place == places[number]
        assert record.record == str(record_file(tmp_path, number))


def test_a_running_server_replaces_one_that_has_ended(two_killed: list[Killed]) -> None:
    """Also if the one that has ended has the number of the engine."""
    folder = two_killed[0].record.parent
    signal.pidfd_send_signal(two_killed[0].processes[0], signal.SIGKILL)
    assert two_killed[0].has_ended() and two_killed[0].folder.exists()
    record = ServerRecord.model_validate_json(two_killed[1].record.read_text())
    two_killed[1].record.write_text(record.model_copy(update={"place": "rollout-0"}).model_dump_json())
    assert move_servers(folder, {0: "rollout-0"}) == []
    assert not two_killed[0].folder.exists()
    adopt_moved(two_killed, {1: 0})
