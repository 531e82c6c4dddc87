"""The sandbox permits ordinary code and stops attacks."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import interlace
from interlace.agents.sandbox.client import LastingSandbox, Sandbox
from interlace.agents.sandbox.config import SandboxConfig
from interlace.agents.sandbox.limits import CodeResult
from interlace.agents.sandbox.probe import GUARDS, read_findings
from interlace.core.errors import InterlaceError

ADD_KEY = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
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


def test_numpy_starts_no_thread_for_each_core(box: Box) -> None:
    """On a machine of many cores its import failed: the threads exceeded the run's processes and address space."""
    code = (
        "import numpy, os\nones = numpy.ones((50, 50))\nfloat((ones @ ones).sum()), len(os.listdir('/proc/self/task'))"
    )
    result = box.run(code)
    assert (result.stdout, result.stderr) == ("(125000.0, 1)\n", "")


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
    _check_server_is_alone(box)


def test_orphan_with_a_session_of_its_own_ends_with_the_code(box: Box) -> None:
    orphan = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)"
    )
    result = box.run(f"{orphan}\n    os._exit(0)\nprint('left')")
    assert result.stdout == "left\n" and not result.timed_out and result.seconds < 2
    _check_server_is_alone(box)


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
    for path in (str(tmp_path / "file"), f"{sys.base_prefix}/lib/file", "/file"):
        assert "Error: [Errno" in box.run(f"open({path!r}, 'w')").stderr
        assert not Path(path).exists()
    assert "File too large" in box.run("open('f', 'wb').write(bytes(20 << 20))").stderr
    fill = "for n in range(20): open(str(n), 'wb').write(bytes(15 << 20))"
    assert "No space left" in box.run(fill).stderr


def test_endless_output_does_not_outlive_the_time_limit(box: Box) -> None:
    result = box.run("while True: print('x' * 1000)")
    assert result.timed_out and result.seconds < 3


def test_files_of_the_machine_cannot_be_read(box: Box, tmp_path: Path) -> None:
    box.needs("files")
    (tmp_path / "answers.jsonl").write_text("42")
    (tmp_path / "answers.jsonl").chmod(0o644)
    for path in (tmp_path / "answers.jsonl", Path(__file__), Path(interlace.__file__), Path("/etc/shadow")):
        assert "No such file" in box.run(f"open({str(path)!r}).read()").stderr
    home = box.run("import os; print(sorted(os.listdir('/')), os.path.expanduser('~'))").stdout
    assert "home" not in home.split("]")[0]


def test_unix_and_vsock_sockets_are_refused_and_socket_pairs_work(box: Box) -> None:
    box.needs("sockets")
    code = """
import socket
a, b = socket.socketpair()
a.send(b"x")
print(b.recv(1))
for family in (socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET, 38, 40):
    try: socket.socket(family, socket.SOCK_DGRAM); print("open", family)
    except OSError as error: print(error.errno)
try: socket.socketpair(type=socket.SOCK_DGRAM)
except OSError as error: print(error.errno)
"""
    assert box.run(code).stdout.split() == ["b'x'", *["97"] * 5, "1"]


def test_kernel_keys_are_out_of_reach(box: Box) -> None:
    box.needs("keys")
    call = f"import ctypes; print(ctypes.CDLL(None).syscall({ADD_KEY}, b'user', b'probe', b'x', 1, -3))"
    assert box.run(call).stdout == "-1\n"


def test_no_capability_is_gained_in_a_nested_user_namespace(box: Box) -> None:
    box.needs("privileges")
    assert box.run("import ctypes; print(ctypes.CDLL(None).unshare(0x50000000))").stdout == "-1\n"


def test_programs_threads_and_locks_work_inside(box: Box) -> None:
    code = """
import multiprocessing, subprocess, sys, threading
print(subprocess.run([sys.executable, "-I", "-c", "print(6 * 7)"], capture_output=True, text=True).stdout.strip())
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
with multiprocessing.Lock(): print("lock")
"""
    result = box.run(code)
    assert result.stdout.split() == ["42", "thread", "lock"], result.stderr


def test_an_environment_below_tmp_is_readable_inside(box: Box) -> None:
    box.needs("mounts", "files")
    program = (
        "import asyncio, sys\nfrom interlace.agents.sandbox.client import Sandbox\n"
        "from interlace.agents.sandbox.config import SandboxConfig\n"
        "async def main():\n sandbox = await Sandbox.start(SandboxConfig(sandbox='available'))\n"
        ' print(await sandbox.run(\'import extra; open("/tmp/file", "w"); open(extra.__file__, "a")\'))\n'
        " sandbox.close()\nasyncio.run(main())"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        [packages] = Path(folder).glob("lib/python*/site-packages")
        (packages / "extra.py").write_text("")
        places = [str(Path(interlace.__file__).parents[1]), *[path for path in sys.path if "site-packages" in path]]
        command = [f"{folder}/bin/python", "-c", program]
        environment = {**os.environ, "PYTHONPATH": ":".join(places)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    result = done.stdout + done.stderr
    assert "Permission denied" in result or "Read-only" in result, result
    assert f"{packages / 'extra.py'}" in result and "/tmp/file" not in result.split("Error: ")[-1], result


def test_an_ordinary_user_keeps_every_guard(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    program = (
        "import asyncio\nfrom interlace.agents.sandbox.client import Sandbox\n"
        "async def main():\n sandbox = await Sandbox.start()\n"
        " print((await sandbox.run('import os; os.listdir(\"/home\")')).stderr)\n sandbox.close()\nasyncio.run(main())"
    )
    python = _python_of_others()
    places = [str(Path(interlace.__file__).parents[1]), *[path for path in sys.path if path.endswith("site-packages")]]
    environment = {"PYTHONPATH": ":".join(places), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", python, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment, cwd="/")
    if "user namespace" in done.stderr:
        pytest.skip("ordinary users have no user namespaces on this machine")
    assert "No such file" in done.stdout, done.stderr


def _python_of_others() -> str:
    """A Python of this version that every user may start."""
    for python in (sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"):
        parents = [*Path(python).resolve().parents]
        if Path(python).exists() and all(parent.stat().st_mode & 0o001 for parent in parents):
            return python
    pytest.skip("no Python of this version is open to other users")


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


def test_closed_sandbox_leaves_no_process_and_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> int:
        sandbox = await Sandbox.start(CONFIG)
        sandbox.close()
        with pytest.raises(InterlaceError, match="server has ended"):
            await sandbox.run("1")
        return sandbox._server.pid

    with tempfile.TemporaryDirectory() as folder:  # a short path: the sandbox's probe listens at a socket file
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        pid = asyncio.run(use())
        assert not [*Path(folder).iterdir()] and not Path(f"/proc/{pid}").exists()


def test_guard_that_was_not_set_up_is_missing_whatever_stood_in_for_it() -> None:
    result = CodeResult(
        stdout='{"network": "", "writes": ""}', stderr="", exit_code=0, signal=None, timed_out=False,
        num_dropped_bytes=0, seconds=0.1, lost={"writes": "landlock: Function not implemented"},
    )  # fmt: skip
    report = read_findings(result)
    assert report.missing == {"writes": "landlock: Function not implemented"}
    assert GUARDS["writes"] in report.describe()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare")
def test_strict_is_refused_where_namespaces_are_forbidden() -> None:
    program = (
        "import asyncio\nfrom interlace.agents.sandbox.client import Sandbox\n"
        "try: asyncio.run(Sandbox.start())\nexcept Exception as error: print(type(error).__name__, error)"
    )
    forbid = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -c "$0"'
    command = ["unshare", "-U", "--map-user=1000", "--keep-caps", "sh", "-c", forbid, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"this machine has no user namespaces: {done.stderr}")
    assert done.stdout.startswith("UserError sandbox: strict cannot be kept on this machine. Missing:")
    assert GUARDS["network"] in done.stdout and "sandbox: available" in done.stdout


def _check_server_is_alone(box: Box) -> None:
    """Waits for the end of the process that sent the last reply, which it outlives for a moment."""
    deadline_s = time.monotonic() + 10
    while _processes_of(box) != 1:
        assert time.monotonic() < deadline_s, "a process outlives the code"
        time.sleep(0.02)


def _processes_of(box: Box) -> int:
    """Counts the processes that came of the server, itself included, by its name in their command lines."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_one = b"interlace.agents.sandbox.server" in (entry / "cmdline").read_bytes()
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


def test_a_call_right_after_a_kill_of_the_server_runs_in_a_new_one() -> None:
    """The connection was closed before the end of the process was seen, so that the call failed."""

    async def call_often() -> list[str]:
        lasting, found = LastingSandbox(CONFIG), []
        for _ in range(12):
            await lasting.run("1")
            assert lasting._sandbox is not None
            lasting._sandbox._server.kill()
            found.append((await lasting.run("1 + 1")).stdout.strip())
        assert lasting._sandbox is not None
        lasting._sandbox.close()
        return found

    assert asyncio.run(call_often()) == ["2"] * 12


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("keeper.keep_run(socket.socket(), site, 0)", id="keeper"),
        pytest.param("keeper._run_init('print(1)', 0, writes, site, pathlib.Path())", id="init"),
    ],
)
def test_a_process_whose_parent_ended_while_it_started_ends(start: str) -> None:
    """The kernel sends no signal for the end of a parent before the request, so code ran without a time limit."""
    code = f"""
import os, pathlib, socket
from interlace.agents.sandbox import keeper
from interlace.agents.sandbox.limits import CodeLimits
site = keeper.Site(limits=CodeLimits(timeout_s=1.0), lost={{"mounts": ""}}, folder=pathlib.Path())
writes = {{}}
for name in ("stdout", "stderr", "status"):
    read, writes[name] = os.pipe()
    os.close(read)
{start}
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 1, found
