"""Hosts on one machine: network namespaces with addresses, names and shared memory, and the link between two."""

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.engine_servers import KEY, START_S

REPOSITORY = Path(__file__).parents[2]
INTERLACE = [sys.executable, "-c", "from interlace.cli.main import app; app()"]
RAY = [str(Path(sys.executable).with_name("ray"))]
RAY_PORT = 6391
GIGABIT = 1e9
_PAIRS = itertools.count()
_DEVICE, _MTU = "wire", "9000"
_ENTER = 'mount --bind "$0/shm" /dev/shm && hostname "$(basename "$0")" && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Host:
    """One namespace. Its processes see none of the shared memory of other hosts."""

    name: str
    address: str
    folder: Path

    def start(
        self, command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command on the host."""
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", _ENTER, str(self.folder), *command]
        environment = {
            **os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            **(variables or {}),
        }  # fmt: skip
        with log.open("ab") as out:
            return subprocess.Popen(inside, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=self.folder)

    def serve(self, port: int, *settings: str) -> str:
        """Starts an engine server of the quick start's model, and waits until it listens. Returns its address."""
        log = self.folder / f"server-{port}.log"
        address = ["--host", self.address, "--port", str(port)]
        command = [*INTERLACE, "serve", "tiny:micro", *address, "cluster.devices=cpu:1", *settings]
        process = self.start([*command, "cluster.threads_per_worker=1"], log, {"INTERLACE_ADMIN_KEY": KEY})
        deadline_s = time.monotonic() + START_S
        while f"serving on http://{self.address}:{port}" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        return f"http://{self.address}:{port}"

    def run(self, command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
        """Runs a command on the host to its end."""
        assert self.start(command, log, variables).wait(START_S) == 0, log.read_text()

    def processes(self) -> list[int]:
        """Returns the processes of the host."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(number) for number in listed.stdout.split()]

    def lose(self) -> None:
        """Ends all processes of the host, as a power cut does."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Two hosts and the link between them."""

    first: Host
    second: Host
    relay: subprocess.Popen[bytes]

    def cut(self) -> None:
        """Drops all packets between the hosts."""
        self._tell(b"cut\n")

    def join(self) -> None:
        """Ends cut()."""
        self._tell(b"join\n")

    def _tell(self, line: bytes) -> None:
        assert self.relay.stdin is not None and self.relay.stdout is not None
        self.relay.stdin.write(line)
        self.relay.stdin.flush()
        assert self.relay.stdout.readline() == line


def why_not() -> str:
    """Returns why this machine cannot have hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        _ip("netns", "add", "il-probe")
        _ip("netns", "del", "il-probe")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"`ip netns add` fails: {error}"
    return ""


@contextlib.contextmanager
def two_hosts(delay_s: float = 0.0, bits_per_s: float = GIGABIT) -> Iterator[Hosts]:
    """Makes two hosts with a link. delay_s: of a packet, in each direction. Ends their processes afterwards."""
    made: list[Host] = []
    pair = next(_PAIRS)
    with contextlib.ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="il-hosts-"))
        stack.callback(subprocess.run, ["rm", "-rf", str(root)], check=False)
        for number in (1, 2):
            host = Host(
                name=f"il-{os.getpid()}-{pair}-{number}", address=f"10.77.0.{number}", folder=root / f"host-{number}"
            )
            (host.folder / "shm").mkdir(parents=True)
            _run("mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", str(host.folder / "shm"))
            stack.callback(_run, "umount", "-l", str(host.folder / "shm"))
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
            stack.callback(_end, host)
            made.append(host)
        names = [host.name for host in made]
        relay = subprocess.Popen(
            [sys.executable, "-m", "tests.support.relay", *names, _DEVICE, str(delay_s), str(bits_per_s)],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        stack.callback(relay.communicate)
        assert relay.stdout is not None and relay.stdout.readline() == b"open\n"
        for host in made:
            inside = ("netns", "exec", host.name, "ip")
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", _DEVICE)
            _ip(*inside, "link", "set", _DEVICE, "mtu", _MTU, "up")
        yield Hosts(first=made[0], second=made[1], relay=relay)


def start_ray(hosts: Hosts) -> dict[str, str]:
    """Starts a Ray node with one core on each host. Returns the variables of a process that joins them."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_worker_niceness": "0"}
    head = f"{hosts.first.address}:{RAY_PORT}"
    first = [
        "--head",
        "--port",
        str(RAY_PORT),
        "--include-dashboard=false",
        "--temp-dir",
        str(hosts.first.folder / "r"),
    ]
    for host, role in ((hosts.first, first), (hosts.second, ["--address", head])):
        given = ["--node-ip-address", host.address, "--num-cpus", "1", "--object-store-memory", str(200 << 20)]
        host.run([*RAY, "start", *role, *given, "--disable-usage-stats"], host.folder / "ray.log", token)
    return {**token, "RAY_ADDRESS": head}


def _end(host: Host) -> None:
    deadline_s = time.monotonic() + 20
    while host.processes() and time.monotonic() < deadline_s:
        host.lose()
        time.sleep(0.1)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
