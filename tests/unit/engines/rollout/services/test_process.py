"""A server that a run starts can be started again after it was killed, and is lost if a signal stops it."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from interlace.core.errors import InterlaceError
from interlace.core.processes import list_children
from interlace.core.types import Request
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.rollout.config import ServedConfig
from interlace.engines.rollout.services.adoption import write_record
from interlace.engines.rollout.services.check import run_unless_faulty
from interlace.engines.rollout.services.hosted import HostedEngine
from interlace.engines.rollout.services.lease import ServerLease, record_file
from interlace.engines.rollout.services.link import ServerLink
from interlace.engines.rollout.services.process import ServerCommand, ServerProcess
from interlace.engines.rollout.services.protocol import (
    Address,
    OnDelta,
    OutOfMemoryError,
    ServiceCapacity,
    ServiceError,
    ServiceHealth,
)
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from tests.support.engine_servers import wait_until

LISTEN = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1]); print('listening')"


def test_a_server_listens_at_the_socket_file_that_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    command = ServerCommand(arguments=("-c", LISTEN, str(path)))
    lease = ServerLease(seconds=0.0, record=tmp_path / "record.json", folder=tmp_path)
    process = ServerProcess(command, Address(url=f"unix:{path}"), lease)
    for _ in range(2):
        process.start()
        wait_until(lambda: process.fault() is not None)
        assert process.tail() == "listening" and path.exists()
        process.stop(hurries=True)


def test_the_record_of_a_new_server_of_the_same_name_stays(tmp_path: Path) -> None:
    record, command = record_file(tmp_path, 0), ServerCommand(arguments=())
    address, servers = Address(url="http://127.0.0.1:9"), []
    for name in ("old", "new"):
        lease = ServerLease(seconds=600.0, record=record, folder=tmp_path / name)
        lease.folder.mkdir()
        write_record(lease, address, command, "model")
        servers.append(ServerProcess(command, address, lease))
    old, new = servers
    old.remove_files()
    assert record.exists() and not old.lease.folder.exists()
    new.remove_files()
    assert not record.exists() and not new.lease.folder.exists()


SERVES = """
import signal, sys, time
from pathlib import Path

folder, ends = Path(sys.argv[1]), sys.argv[2] == "ends"

def end(*_):
    (folder / "asked").touch()
    if ends:
        (folder / "cleaned").touch()
        sys.exit()

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    time.sleep(600)
"""
FAILS = """
import sys, time
from pathlib import Path
from interlace.engines.rollout.services import process
from interlace.engines.rollout.services.protocol import Address
from interlace.engines.rollout.services.lease import ServerLease

process.EXIT_S = float(sys.argv[3])
for number, ends in enumerate(sys.argv[4:]):
    folder = Path(sys.argv[1], str(number))
    folder.mkdir()
    lease = ServerLease(seconds=600.0, record=folder / "record.json", folder=folder / "server")
    lease.folder.mkdir()
    command = process.ServerCommand(arguments=("-c", sys.argv[2], str(folder), ends))
    server = process.ServerProcess(command, Address(url="http://127.0.0.1:9"), lease)
    server.start()
    while server.tail() != "ready":
        time.sleep(0.02)
    print(server.pid, flush=True)
raise RuntimeError("an error")
"""


def test_servers_end_by_sigterm_before_they_are_killed_when_the_command_fails(tmp_path: Path) -> None:
    def fail(exit_s: float, *servers: str) -> list[int]:
        command = [sys.executable, "-c", FAILS, str(tmp_path), SERVES, str(exit_s), *servers]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 1 and "RuntimeError: an error" in done.stderr
        return [int(line) for line in done.stdout.split()]

    fail(300.0, "ends", "ends")
    assert (tmp_path / "0" / "cleaned").exists() and (tmp_path / "1" / "cleaned").exists()
    assert not [*tmp_path.glob("*/server"), *tmp_path.glob("*/record.json")]
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    [guard] = fail(1.0, "stays")
    assert (tmp_path / "0" / "asked").exists() and not Path("/proc", str(guard)).exists()


ENDS_BY_SIGINT = """
import os, signal, time
def interrupt(number, _):
    signal.signal(number, signal.SIG_IGN)  # the guard may send it a second time
    os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGTERM, interrupt)
print(signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("ended", flush=True)
"""


def test_a_server_of_a_thread_that_blocks_sigint_ends_by_it(tmp_path: Path) -> None:
    """Threads of Ray's workers block SIGINT, and some ignore SIGCHLD. Servers inherited both."""
    lease = ServerLease(seconds=0.0, record=tmp_path / "record.json", folder=tmp_path / "server")
    lease.folder.mkdir()
    process = ServerProcess(ServerCommand(arguments=("-c", ENDS_BY_SIGINT)), Address(url="http://127.0.0.1:9"), lease)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGCHLD, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    wait_until(lambda: process.tail() == "True")
    process.stop()
    assert process.tail().endswith("ended")


class NeverAnswers(HostedEngine):
    """A server that does not listen yet, or that hangs in the request before it serves."""

    is_healthy = False

    async def health(self) -> ServiceHealth:
        if not self.is_healthy:
            raise ServiceError("no answer")
        return await super().health()

    async def generate(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        await asyncio.sleep(600)


@pytest.mark.parametrize("is_healthy", [False, True])
def test_a_server_that_is_stopped_during_its_start_is_lost_at_once(tmp_path: Path, is_healthy: bool) -> None:
    """Not after start_s: a run that waits ten minutes for it ends with `no engine has served`."""
    lease = ServerLease(seconds=0.0, record=tmp_path / "record.json", folder=tmp_path / "server")
    lease.folder.mkdir()
    process = ServerProcess(
        ServerCommand(arguments=("-c", "import time; time.sleep(600)")), Address(url="http://127.0.0.1:9"), lease
    )
    engine = NativeEngine(load_model(ModelConfig(path="tiny:micro")).model, config=NativeConfig(max_tokens=1024))
    client = NeverAnswers(engine, ServiceCapacity())
    client.is_healthy = is_healthy
    limits = ServedConfig(heartbeat_s=60.0, health_timeout_s=60.0, progress_s=60.0, start_s=600.0, probe_gap=0.05)
    link = ServerLink(lambda: client, limits, process=process)

    def stop_server() -> None:
        wait_until(lambda: has_started(process) and bool(list_children(process.pid)))
        os.kill(list_children(process.pid)[0], signal.SIGSTOP)

    stopper = threading.Thread(target=stop_server)
    stopper.start()
    with pytest.raises(ServiceError, match="a signal has stopped the server"):
        link.open()
    stopper.join()


def has_started(process: ServerProcess) -> bool:
    try:
        return process.pid > 0
    except InterlaceError:
        return False


DIES = "import time; time.sleep(1.0); print('CUDA out of memory', flush=True)"


def test_a_server_that_dies_reports_its_own_reason_although_its_connection_breaks_first(tmp_path: Path) -> None:
    lease = ServerLease(seconds=0.0, record=tmp_path / "record.json", folder=tmp_path / "server")
    lease.folder.mkdir()
    process = ServerProcess(ServerCommand(arguments=("-c", DIES)), Address(url="http://127.0.0.1:9"), lease)
    process.start()

    async def work() -> None:
        wait_until(lambda: "out of memory" in process.tail())
        raise OSError("connection closed by the server")

    with pytest.raises(OutOfMemoryError):
        asyncio.run(run_unless_faulty(work(), process.fault))
    process.stop()
