"""Processes start without the user's script, with the current folder, and despite a stopped fork server."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from interlace.runtime.process import pool
from interlace.runtime.process.child import become_child
from interlace.runtime.process.launch import ForkServers, fork_servers, spawn_context
from interlace.runtime.process.links import Child
from interlace.runtime.process.pool import ProcessJob, ProcessPool
from interlace.runtime.process.shared import make_shared_folder
from tests.support.processes import all_gone, handles


def greet(connection: socket.socket) -> None:
    """Sends one byte and waits for the end of the connection."""
    connection.sendall(b"x")
    connection.recv(1)


class Greeters(ProcessPool[ProcessJob, ProcessJob]):
    """One process that greets; replaced if it ends."""

    def __init__(self) -> None:
        super().__init__("greeter", ())
        self.ready, self.failed = threading.Event(), threading.Event()
        self.reasons: list[str] = []
        self._thread.start()
        self._links.wake()

    def _accept(self, submitted: ProcessJob) -> None:
        raise AssertionError(submitted)

    def _handle_late(self, child: Child, late: Sequence[ProcessJob]) -> None:
        raise AssertionError(child, late)

    def _hand_out(self) -> None:
        if not self._children and not self.failed.is_set():
            self._start(greet)

    def _heard(self, child: Child) -> None:
        if child.received:
            self._is_ready(child)
            self.ready.set()

    def _handle_death(self, child: Child) -> None:
        child.find_exit_code()
        self._record_bad_start("it ended")
        self._end(child)
        self._links.wake()

    def _could_not_start(self, reason: str) -> None:
        self.reasons.append(reason)
        self.failed.set()

    def _fail_all(self, error: BaseException | None) -> None:
        if error:
            self.reasons.append(repr(error))


@pytest.fixture
def stopped_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A warm fork server that was stopped for good."""
    fork_servers(()).start("warm", greet, (socket.socket(),)).kill()
    server = fork_servers(())._server
    pid: int = server._forkserver_pid  # type: ignore[union-attr]  # the standard library has no public name for it
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(pool, "START_S", 0.5)
    yield pid
    os.kill(pid, signal.SIGKILL)


def test_a_stopped_fork_server_is_replaced(stopped_server: int) -> None:
    greeters = Greeters()
    assert greeters.ready.wait(60)
    assert fork_servers(())._server._forkserver_pid != stopped_server  # type: ignore[union-attr]
    greeters.close()
    assert not greeters.reasons


def test_processes_can_be_closed_while_the_fork_server_is_stopped(
    stopped_server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    del stopped_server
    monkeypatch.setattr(pool, "START_S", 600.0)
    greeters = Greeters()
    start = time.monotonic()
    greeters.close()
    assert time.monotonic() - start < 10
    fork_servers(()).replace()


def test_a_start_that_fails_thrice_fails_the_waiting_jobs_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(ForkServers, "start", fail)
    greeters = Greeters()
    assert greeters.failed.wait(10)
    greeters.close()
    assert greeters.reasons == ["no room"]


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    lines = [
        "from pathlib import Path",
        "from interlace.runtime.process.launch import spawn_context",
        "with Path('runs').open('a') as file: file.write('run ')",
        "spawn_context().Process(target=print, args=('inside',)).start()",
    ]
    (tmp_path / "script.py").write_text("\n".join(lines))
    done = _run_script(tmp_path)
    assert (tmp_path / "runs").read_text() == "run " and done.stdout == "inside\n", done.stderr


def test_a_script_whose_function_is_needed_is_imported_and_its_calls_name_the_guard(tmp_path: Path) -> None:
    lines = [
        "from interlace.runtime.process.launch import refuse_in_child, spawn_context",
        "def inside(): print('inside')",
        "refuse_in_child('interlace.train()')",
        "process = spawn_context().Process(target=inside)",
        "process.start()",
    ]
    (tmp_path / "script.py").write_text("\n".join(lines))
    assert 'under `if __name__ == "__main__":`' in _run_script(tmp_path).stderr
    lines[2:] = ["if __name__ == '__main__':", *[f"    {line}" for line in lines[2:]]]
    (tmp_path / "script.py").write_text("\n".join(lines))
    assert _run_script(tmp_path).stdout == "inside\n"


def _run_script(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_modules_of_the_current_folder_are_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_here.py").write_text("def leave(): raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    process = spawn_context().Process(target=_call_module)
    process.start()
    process.join(60)
    assert process.exitcode == 7


def _call_module() -> None:
    import module_here  # type: ignore[import-not-found]  # the test writes it

    module_here.leave()


def _send_modules(connection: socket.socket) -> None:
    connection.sendall(str([name for name in ("colorsys", "wave") if name in sys.modules]).encode())


def _send_frozen(connection: socket.socket) -> None:
    connection.sendall(str(gc.get_freeze_count()).encode())


def test_a_search_for_cycles_leaves_out_the_objects_of_the_server() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = fork_servers(("colorsys",)).start("frozen", _send_frozen, (theirs,))
        assert int(ours.recv(100)) > 1000
        process.join(60)


def test_an_import_outside_of_a_fork_server_freezes_no_objects() -> None:
    code = "import gc, interlace.runtime.process.fork_server; print(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"


def start_and_wait() -> None:
    """Makes a folder in shared memory and starts a process that serves the run. Prints the folder and both numbers."""
    folder = make_shared_folder()
    assert folder is not None
    ours, theirs = socket.socketpair()
    process = fork_servers(()).start("child", _serve_run, (theirs,))  # a process without a reference may end
    child, server = ours.recv(100).decode().split()
    print(folder.path, child, server, flush=True)
    time.sleep(600)
    process.join()


def _serve_run(connection: socket.socket) -> None:
    become_child()
    connection.sendall(f"{os.getpid()} {os.getppid()}".encode())
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder, and processes have handles")
@pytest.mark.parametrize("stopped", [[], ["child"], ["child", "server"]])
def test_a_killed_run_leaves_no_process_and_no_folder(stopped: list[str]) -> None:
    """A process that a signal had stopped stayed, and so did a checkpoint in shared memory."""
    code = f"from {__name__} import start_and_wait; start_and_wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        folder, *numbers = run.stdout.readline().split()
        found = dict(zip(("child", "server"), handles([int(number) for number in numbers]), strict=True))
        for name in stopped:
            signal.pidfd_send_signal(found[name], signal.SIGSTOP)
        run.kill()
    assert all_gone([*found.values()], 15.0)
    assert not Path(folder).exists()
    for handle in found.values():
        os.close(handle)


def test_processes_of_each_kind_start_with_their_modules() -> None:
    """Also if processes of another kind started before."""
    for module in ("colorsys", "wave"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = fork_servers((module,)).start("kind", _send_modules, (theirs,))
            assert ours.recv(100).decode() == str([module])
            process.join(60)
