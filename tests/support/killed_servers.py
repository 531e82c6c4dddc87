"""Servers of a run that was killed, for tests of their adoption."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from interlace.engines.rollout.services.adoption import ServerRecord, adopt_server
from interlace.engines.rollout.services.process import ServerCommand
from tests.support.engine_servers import wait_until
from tests.support.processes import all_gone, children, descendants, handles

SLEEP = ("-c", "import time; time.sleep(600)")
START = """
import signal, sys, time
from pathlib import Path
from interlace.engines.rollout.services.adoption import write_record
from interlace.engines.rollout.services.protocol import Address
from interlace.engines.rollout.services.lease import ServerLease
from interlace.engines.rollout.services.process import ServerCommand, ServerProcess

record, folder, seconds, detaches = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "True"
command = ServerCommand(arguments=sys.argv[5:])
lease = ServerLease(seconds=seconds, record=record, folder=folder)
address = Address(url="http://127.0.0.1:9", key="key")
write_record(lease, address, command, "model", place=record.stem)
server = ServerProcess(command, address, lease, detaches=detaches)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""
ADOPT = """
import sys, time
from pathlib import Path
from interlace.engines.rollout.services.adoption import adopt_server
from interlace.engines.rollout.services.process import ServerCommand

adopt_server(Path(sys.argv[1]), 600.0, "model", lambda _: ServerCommand(arguments=tuple(sys.argv[2:])))
print("adopted", flush=True)
time.sleep(600)
"""


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A run that was killed, and the processes of its server."""

    record: Path
    folder: Path
    processes: list[int]

    def adopt(self, arguments: tuple[str, ...] = SLEEP, *, model: str = "model", record: Path | None = None) -> object:
        """Adopts the server as a run that would start a server with these arguments."""

        def command(found: ServerRecord) -> ServerCommand:
            assert found.address.key == "key"
            return ServerCommand(arguments=arguments)

        file = record or self.record
        return adopt_server(file, 600.0, model, command)

    def has_ended(self, within_s: float = 30.0) -> bool:
        """Returns whether all processes of the server end."""
        return all_gone(self.processes, within_s)


def start_run(
    record: Path, folder: Path, seconds: float, arguments: tuple[str, ...] = SLEEP, *, detaches: bool = False
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a run with a server. Returns the run, and the guard's process id."""
    command = [sys.executable, "-c", START, str(record), str(folder), str(seconds), str(detaches), *arguments]
    run = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert run.stdout is not None
    guard = int(run.stdout.readline())
    return run, guard


def kill_run(record: Path, folder: Path, seconds: float) -> Killed:
    run, guard = start_run(record, folder, seconds)
    wait_until(lambda: bool(children(guard)))
    found = Killed(record=record, folder=folder, processes=handles(descendants(guard)))
    run.kill()
    run.wait()
    return found


def close_servers(found: Killed) -> None:
    """Kills the processes of a server that have not ended, and closes their handles."""
    for handle in found.processes:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
