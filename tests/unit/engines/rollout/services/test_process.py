"""Servers that a run starts end with it, and can be started again after they were killed."""

import shutil
import subprocess
import sys
from pathlib import Path

from interlace.engines.rollout.services.http import Address
from interlace.engines.rollout.services.lease import ServerLease
from interlace.engines.rollout.services.process import ServerCommand, ServerProcess
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
from interlace.engines.rollout.services.http import Address
from interlace.engines.rollout.services.lease import ServerLease

process.EXIT_S = float(sys.argv[3])
for number, ends in enumerate(sys.argv[4:]):
    folder = Path(sys.argv[1], str(number))
    folder.mkdir()
    lease = ServerLease(seconds=600.0, record=folder / "record.json", folder=folder)
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
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    [guard] = fail(1.0, "stays")
    assert (tmp_path / "0" / "asked").exists() and not Path("/proc", str(guard)).exists()
