"""Code in the sandbox: what it may do, and what attacks come to."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlace.core.errors import InterlaceError
from interlace.sandbox.client import Sandbox
from interlace.sandbox.config import SandboxConfig
from interlace.sandbox.limits import CodeResult
from interlace.sandbox.probe import GUARDS, findings

CONFIG = SandboxConfig(sandbox="available", timeout_s=1.0, processes=8, output_bytes=1000)


class Box:
    """A sandbox with a loop of its own."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.sandbox = self.runner.run(Sandbox.start(CONFIG))

    def run(self, code: str, stdin: str = "") -> CodeResult:
        return self.runner.run(self.sandbox.run(code, stdin=stdin))

    def needs(self, *guards: str) -> None:
        if missing := [name for name in guards if name in self.sandbox.report.missing]:
            pytest.skip(f"this machine does not keep {missing}")


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    found = Box()
    yield found
    found.sandbox.close()
    found.runner.close()


def test_value_of_the_last_expression_is_printed_and_input_is_there(box: Box) -> None:
    result = box.run("import math\nn = int(input())\nprint('n is', n)\nmath.factorial(n)", stdin="5\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("n is 5\n120\n", "", 0)


def test_error_shows_the_line_of_the_code_alone(box: Box) -> None:
    result = box.run("x = 0\n1 / x")
    assert result.exit_code == 1
    assert "line 2" in result.stderr and "1 / x" in result.stderr and "ZeroDivisionError" in result.stderr
    assert "interlace" not in result.stderr


def test_runs_do_not_see_each_other(box: Box) -> None:
    box.run("import builtins; builtins.left = 1; open('file', 'w').write('left')")
    assert box.run("import os; print(os.listdir('.'), 'left' in dir(__builtins__))").stdout == "[] False\n"


def test_exit_status_and_signal_are_told(box: Box) -> None:
    assert box.run("import sys; sys.exit(7)").exit_code == 7
    assert box.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").signal == "SIGSEGV"


def test_endless_loop_is_killed_at_its_wall_time(box: Box) -> None:
    result = box.run("print('begun', flush=True)\nwhile True: pass")
    assert result.timed_out and result.stdout == "begun\n" and result.seconds < 3


def test_code_that_ignores_signals_is_killed(box: Box) -> None:
    ignore = (
        "import signal, time\nfor s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, lambda *a: 0)"
    )
    assert box.run(f"{ignore}\ntime.sleep(60)").timed_out


def test_fork_bomb_meets_the_limit_and_leaves_nothing(box: Box) -> None:
    box.needs("processes", "pid")
    result = box.run("import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)")
    assert result.timed_out
    assert box.run("1 + 1").stdout == "2\n"
    assert _processes_of(box) == 1  # the server alone


def test_orphan_with_a_session_of_its_own_ends_with_the_code(box: Box) -> None:
    orphan = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)"
    )
    result = box.run(f"{orphan}\n    os._exit(0)\nprint('left')")
    assert result.stdout == "left\n" and not result.timed_out and result.seconds < 2
    assert _processes_of(box) == 1


def test_orphan_that_holds_the_output_open_does_not_keep_the_caller(box: Box) -> None:
    start = time.monotonic()
    box.run("import subprocess\nsubprocess.Popen(['sleep', '600'])\nprint('done')")
    assert time.monotonic() - start < 2


def test_memory_is_bounded(box: Box) -> None:
    assert "MemoryError" in box.run("x = bytearray(10 ** 10)").stderr


def test_output_is_bounded_and_what_was_dropped_is_counted(box: Box) -> None:
    result = box.run("print('x' * 10 ** 7)")
    assert len(result.stdout) == 1000 and result.num_dropped_bytes == 10**7 + 1 - 1000


def test_network_cannot_be_reached(box: Box) -> None:
    box.needs("network")
    code = """
import socket
for host in ("127.0.0.1", "192.0.2.1"):
    connection = socket.socket()
    connection.settimeout(1)
    print(connection.connect_ex((host, 9)))
"""
    assert all(int(line) not in (0, 11, 111, 115) for line in box.run(code).stdout.split())


def test_writes_outside_are_refused_and_inside_are_bounded(box: Box, tmp_path: Path) -> None:
    box.needs("writes", "file", "scratch")
    tmp_path.chmod(0o777)
    assert "OSError" in box.run(f"open({str(tmp_path / 'file')!r}, 'w')").stderr.replace("PermissionError", "OSError")
    assert not (tmp_path / "file").exists()
    assert "File too large" in box.run("open('f', 'wb').write(bytes(20 << 20))").stderr
    fill = "for n in range(20): open(str(n), 'wb').write(bytes(15 << 20))"
    assert "No space left" in box.run(fill).stderr


def test_other_processes_are_out_of_reach(box: Box) -> None:
    box.needs("pid")
    result = box.run(f"import os\nos.kill({os.getpid()}, 0)")
    assert "ProcessLookupError" in result.stderr


def test_caller_that_is_cancelled_ends_the_code(box: Box) -> None:
    async def cancel() -> None:
        run = asyncio.ensure_future(box.sandbox.run("import time; time.sleep(600)"))
        while _processes_of(box) < 2:
            await asyncio.sleep(0.01)
        run.cancel()
        while _processes_of(box) > 1:
            await asyncio.sleep(0.01)

    box.runner.run(asyncio.wait_for(cancel(), 5))


def test_closed_sandbox_leaves_no_process_and_no_folder() -> None:
    async def use() -> tuple[int, str]:
        sandbox = await Sandbox.start(CONFIG)
        sandbox.close()
        with pytest.raises(InterlaceError, match="server is gone"):
            await sandbox.run("1")
        return sandbox._server.pid, sandbox._folder

    pid, folder = asyncio.run(use())
    assert not Path(folder).exists() and not Path(f"/proc/{pid}").exists()


def test_guard_that_was_not_set_up_is_missing_whatever_stood_in_for_it() -> None:
    result = CodeResult(
        stdout='{"network": "", "writes": ""}', stderr="", exit_code=0, signal=None, timed_out=False,
        num_dropped_bytes=0, seconds=0.1, lost={"writes": "landlock: Function not implemented"},
    )  # fmt: skip
    report = findings(result)
    assert report.missing == {"writes": "landlock: Function not implemented"}
    assert GUARDS["writes"] in report.describe()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare")
def test_strict_is_refused_where_namespaces_are_forbidden() -> None:
    program = (
        "import asyncio\nfrom interlace.sandbox.client import Sandbox\n"
        "try: asyncio.run(Sandbox.start())\nexcept Exception as error: print(type(error).__name__, error)"
    )
    forbid = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -c "$0"'
    command = ["unshare", "-U", "--map-user=1000", "--keep-caps", "sh", "-c", forbid, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"this machine has no user namespaces: {done.stderr}")
    assert done.stdout.startswith("UserError sandbox: strict cannot be kept on this machine. Missing:")
    assert GUARDS["network"] in done.stdout and "sandbox: available" in done.stdout


def _processes_of(box: Box) -> int:
    """Counts the processes that came of the server, itself included, by its name in their command lines."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_one = b"interlace.sandbox.server" in (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            inside = _descends(int(entry.name), box.sandbox._server.pid)
        except OSError:
            continue
        found += is_one and state != "Z" and inside
    return found


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False
