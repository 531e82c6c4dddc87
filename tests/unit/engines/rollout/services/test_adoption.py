"""A server outlives a killed run for its lease, and a resumed run adopts it only if it is the run's own server."""

import asyncio
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from interlace.engines.rollout.config import ServedConfig
from interlace.engines.rollout.kinds.base import make_private_folder
from interlace.engines.rollout.services import link
from interlace.engines.rollout.services.adoption import NotAdoptedError, end_unused_servers
from interlace.engines.rollout.services.hosted import HostedEngine
from interlace.engines.rollout.services.lease import AdoptedGuard
from interlace.engines.rollout.services.link import ServerLink
from interlace.engines.rollout.services.process import ServerProcess
from interlace.engines.rollout.services.protocol import PauseMode, ServiceCapacity, ServiceError
from tests.support.engine_servers import wait_until
from tests.support.killed_servers import ADOPT, SLEEP, Killed, close_servers, kill_run, start_run
from tests.support.processes import all_gone, children, descendants, handles


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())  # pytest's folders are too deep for a socket file
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def killed(tmp_path: Path, folder: Path) -> Iterator[Killed]:
    found = kill_run(tmp_path / "rollout-0.json", folder, 600.0)
    yield found
    close_servers(found)


def test_a_server_is_adopted_and_waits_again_after_the_second_run_was_killed(killed: Killed) -> None:
    assert killed.record.stat().st_mode & 0o777 == 0o600
    with subprocess.Popen([sys.executable, "-c", ADOPT, str(killed.record), *SLEEP], stdout=subprocess.PIPE) as second:
        assert second.stdout is not None and second.stdout.readline() == b"adopted\n"
        second.kill()
    server = killed.adopt()
    assert isinstance(server, ServerProcess) and server.is_adopted and server.fault() is None
    server.stop()
    assert killed.has_ended()


def test_a_detached_server_is_no_child_of_its_run_and_is_adopted(tmp_path: Path, folder: Path) -> None:
    """Ray ends a rank with its children."""
    run, guard = start_run(tmp_path / "rollout-0.json", folder, 600.0, detaches=True)
    wait_until(lambda: bool(children(guard)))
    assert guard not in descendants(run.pid)
    found = Killed(record=tmp_path / "rollout-0.json", folder=folder, processes=handles(descendants(guard)))
    run.kill()
    run.wait()
    server = found.adopt()
    assert isinstance(server, ServerProcess) and server.is_adopted and server.pid == guard and server.fault() is None
    server.stop()
    assert found.has_ended()


def test_a_server_has_one_run(killed: Killed) -> None:
    server = killed.adopt()
    with pytest.raises(NotAdoptedError, match="it has ended"):
        killed.adopt()
    assert isinstance(server, ServerProcess) and server.fault() is None and killed.folder.exists()
    server.stop()


@pytest.mark.parametrize(
    ("arguments", "model", "reason"),
    [(("-c", "other"), "model", "its command .* has changed"), (SLEEP, "other", "the model has changed")],
)
def test_a_server_of_other_settings_is_ended(
    killed: Killed, arguments: tuple[str, ...], model: str, reason: str
) -> None:
    with pytest.raises(NotAdoptedError, match=f"was ended: {reason}"):
        killed.adopt(arguments, model=model)
    assert killed.has_ended() and not killed.folder.exists() and not killed.record.exists()


def test_a_server_of_another_run_is_left_alone(killed: Killed, tmp_path: Path) -> None:
    copied = Path(shutil.copy(killed.record, tmp_path / "copy.json"))
    with pytest.raises(NotAdoptedError, match="belongs to the run of"):
        killed.adopt(record=copied)
    server = killed.adopt()
    assert isinstance(server, ServerProcess)
    server.stop()


def test_a_server_whose_guard_was_killed_is_not_adopted(killed: Killed) -> None:
    signal.pidfd_send_signal(killed.processes[0], signal.SIGKILL)
    assert killed.has_ended(), "a server ends with its guard"
    with pytest.raises(NotAdoptedError, match="it has ended"):
        killed.adopt()
    assert not killed.folder.exists()


def test_a_server_whose_guard_ended_while_it_started_ends() -> None:
    """The kernel sends no signal for the end of a parent before the request, so the server stayed for ever."""
    code = "from interlace.core.processes import end_with; end_with(0); print('it runs')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")


def test_a_guard_that_a_signal_has_stopped_ends_after_its_run(tmp_path: Path, folder: Path) -> None:
    """It noticed nothing, so the server stayed for ever."""
    run, guard = start_run(tmp_path / "rollout-0.json", folder, 0.0)
    wait_until(lambda: bool(children(guard)))
    server = handles(descendants(guard))
    os.kill(guard, signal.SIGSTOP)
    run.kill()
    run.wait()
    assert all_gone(server, 30.0) and not folder.exists()


def test_a_waiting_guard_that_a_signal_has_stopped_ends_with_the_next_run(killed: Killed) -> None:
    signal.pidfd_send_signal(killed.processes[0], signal.SIGSTOP)
    with pytest.raises(NotAdoptedError, match="it has ended"):
        killed.adopt()
    assert killed.has_ended() and not killed.folder.exists()


def test_a_server_ends_with_its_lease_and_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    found = kill_run(tmp_path / "rollout-0.json", folder, 0.5)
    assert found.has_ended() and not folder.exists()
    with pytest.raises(NotAdoptedError, match="it has ended"):
        found.adopt()


def test_a_server_that_crashes_without_a_run_leaves_no_folder(killed: Killed) -> None:
    """Such as a server that ends by SIGTERM after its rank on Ray was killed."""
    signal.pidfd_send_signal(killed.processes[1], signal.SIGKILL)
    assert killed.has_ended() and not killed.folder.exists()


def test_the_end_of_a_lease_removes_the_folder_that_a_killed_guard_left(
    killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.pidfd_send_signal(killed.processes[0], signal.SIGKILL)
    assert killed.has_ended() and killed.folder.exists()
    monkeypatch.chdir(killed.record.parent)
    end_unused_servers(Path(), ())  # a command names the folder of its run in relation to the current one
    assert not killed.folder.exists() and not killed.record.exists()


def test_a_server_ends_if_its_record_is_removed(killed: Killed) -> None:
    killed.record.unlink()
    assert killed.has_ended()


def test_only_records_of_servers_without_an_engine_are_removed(tmp_path: Path) -> None:
    for name in ("rollout-1.json", "rollout-2.json", "rollout-x.json", "rollout-x-9.json"):
        (tmp_path / name).touch()
    [sentence] = end_unused_servers(tmp_path, range(2))
    assert sentence.startswith("rollout-2: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout-1.json", "rollout-x-9.json", "rollout-x.json"]


def test_a_command_that_ends_with_an_error_leaves_no_server(tmp_path: Path, folder: Path) -> None:
    run, guard = start_run(tmp_path / "rollout-0.json", folder, 600.0)
    [handle] = handles([guard])
    run.send_signal(signal.SIGINT)  # an error in Python, which nothing handles
    run.wait()
    assert all_gone([handle], 30.0)
    os.close(handle)


def test_a_server_ends_if_its_guard_cannot_listen(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)  # longer than a path of a socket file can be
    deep.mkdir()
    found = kill_run(tmp_path / "rollout-0.json", deep, 600.0)
    assert found.has_ended() and not deep.exists()


def test_the_processes_of_a_server_that_crashed_end_and_may_clean_up(tmp_path: Path, folder: Path) -> None:
    """A process of the server that ends some time after SIGTERM is not killed before."""
    cleaned = tmp_path / "cleaned"
    helper = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.0), pathlib.Path(sys.argv[1]).touch(), sys.exit()))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    server = (
        "import os, subprocess, sys\n"
        f"helper = subprocess.Popen([sys.executable, '-c', {helper!r}, {str(cleaned)!r}], stdout=subprocess.PIPE)\n"
        "helper.stdout.readline(); os.abort()"
    )
    run, guard = start_run(tmp_path / "rollout-0.json", folder, 600.0, ("-c", server))
    [handle] = handles([guard])
    assert all_gone([handle], 30.0) and cleaned.exists()
    os.close(handle)
    run.kill()
    run.wait()


def test_a_run_with_many_open_files_sees_the_end_of_a_guard() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(2048, limits[1])), limits[1]))
    ours, theirs = socket.socketpair()
    try:
        moved = fcntl.fcntl(ours.detach(), fcntl.F_DUPFD, 1024)
        guard = AdoptedGuard(socket.socket(fileno=moved), 0)
        assert guard.poll() is None
        theirs.close()
        assert guard.poll() == 0
        guard.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def make_link(server: ServerProcess, kind: type[HostedEngine], *, patience_s: float = 60.0) -> ServerLink:
    """Returns a link to an engine in this process, in place of the server."""
    from interlace.engines.rollout import (
        NativeConfig,
        NativeEngine,
    )  # loads torch, which adopt_and_wait() does not need
    from interlace.models.config import ModelConfig
    from interlace.models.loading import load_model

    engine = NativeEngine(load_model(ModelConfig(path="tiny:micro")).model, config=NativeConfig(max_tokens=4096))
    limits = ServedConfig(heartbeat_s=60.0, health_timeout_s=patience_s, progress_s=60.0, start_s=600.0, probe_gap=0.05)
    return ServerLink(lambda: kind(engine, ServiceCapacity()), limits, process=server)


class FailsIfWokenAwake(HostedEngine):
    """Server like SGLang's, whose scheduler ends if it is woken while it is awake."""

    wakes_awake = False
    is_asleep = False
    dies_after: Literal["", "sleep", "wake"] = ""
    """Call in whose answer the run is killed."""

    async def sleep(self) -> None:
        await super().sleep()
        type(self).is_asleep = True
        if self.dies_after == "sleep":
            raise ServiceError("the run was killed")

    async def wake(self) -> None:
        if not type(self).is_asleep:
            raise ServiceError("the scheduler ended")
        await super().wake()
        type(self).is_asleep = False
        if self.dies_after == "wake":
            raise ServiceError("the run was killed")


class WakesAwake(FailsIfWokenAwake):
    """Server like vLLM's and ours."""

    wakes_awake = True

    async def wake(self) -> None:
        await HostedEngine.wake(self)


@pytest.mark.parametrize(("sleeps", "is_woken"), [((), False), ((True,), True), ((True, False), False)])
def test_an_adopted_server_is_woken_only_if_it_sleeps(killed: Killed, sleeps: tuple[bool, ...], is_woken: bool) -> None:
    class Server(FailsIfWokenAwake):
        pass

    server = killed.adopt()
    assert isinstance(server, ServerProcess)
    before = make_link(server, Server)
    before.open()
    for each in sleeps:
        before.change_sleep(sleeps=each)
    assert Server.is_asleep == server.sleep_file.exists() == is_woken and not server.change_file.exists()
    after = make_link(server, Server)
    after.open()
    assert not Server.is_asleep and not server.sleep_file.exists()
    after.close()


@pytest.mark.parametrize("kind", [FailsIfWokenAwake, WakesAwake])
@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_a_server_whose_run_was_killed_while_it_was_woken_is_not_woken_awake(
    killed: Killed, kind: type[FailsIfWokenAwake], call: Literal["sleep", "wake"]
) -> None:
    class Server(kind):  # type: ignore[misc, valid-type]
        pass

    server = killed.adopt()
    assert isinstance(server, ServerProcess)
    before = make_link(server, Server)
    before.open()
    if call == "wake":
        before.change_sleep(sleeps=True)
    Server.dies_after = call
    before.change_sleep(sleeps=call == "sleep")
    Server.dies_after = ""
    after = make_link(server, Server)
    if kind is WakesAwake:
        after.open()
        assert not server.sleep_file.exists() and not server.change_file.exists()
        after.close()
        return
    with pytest.raises(ServiceError, match="was sent to sleep or woken when its run was killed"):
        after.open()
    assert killed.has_ended()


def test_an_adopted_server_that_hangs_after_its_health_check_is_replaced_within_a_limit(
    killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hangs(HostedEngine):
        async def pause(self, mode: PauseMode) -> None:
            del mode
            await asyncio.sleep(3600)

    monkeypatch.setattr(link, "ADOPT_S", 0.5)
    server = killed.adopt()
    assert isinstance(server, ServerProcess)
    with pytest.raises(ServiceError, match=r"was not ready to serve within 0\.5 s"):
        make_link(server, Hangs, patience_s=0.5).open()
    assert killed.has_ended()


def test_a_long_temporary_folder_leaves_room_for_socket_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = make_private_folder()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    shutil.rmtree(folder)
