"""A server that a run starts can be started again after it was killed."""

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
