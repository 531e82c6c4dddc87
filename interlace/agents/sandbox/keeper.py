"""One run of code: the keeper, the first process in the run's namespaces, and the code's process.

The *keeper*, outside the namespaces, reads the request, enforces the time limit and collects the output. The *init* is
the first process of the new namespace of ids: all other processes end with it. The *code* is confined, and runs.
"""

import ast
import atexit
import contextlib
import dataclasses
import json
import linecache
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from interlace.agents.sandbox import confine, root
from interlace.agents.sandbox.limits import HEAD, MAX_REQUEST_BYTES, CodeLimits
from interlace.agents.sandbox.seccomp import install_filter
from interlace.core.processes import adopt_orphans, end_with, end_with_parent
from interlace.core.sockets import receive_exactly

_READ = 1 << 16
_ALL_HANDLES = 1 << 20
_CODE_NAME = "<code>"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # Libraries start a thread for each core, for which a run has neither the processes nor the address space.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""Environment variables of the code, in addition to HOME and TMPDIR."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Configuration shared by all runs of a server."""

    limits: CodeLimits
    lost: dict[str, str]
    """Guards that the server could not set up, with the reasons."""
    folder: Path | None
    """Folder for the files of runs if the server could not enter an empty root; else None."""


def keep_run(connection: socket.socket, site: Site, server: int) -> None:
    """Serves one request in this process, which then ends. server: number of the process that forked this one."""
    try:
        _answer(connection, site, server)
    finally:
        os._exit(0)


def _answer(connection: socket.socket, site: Site, server: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    end_with(server)
    adopt_orphans()
    request = json.loads(_receive(connection))
    limits = site.limits
    limits = dataclasses.replace(limits, timeout_s=min(limits.timeout_s, request.get("timeout_s") or limits.timeout_s))
    scratch = Path(tempfile.mkdtemp(dir=site.folder)) if site.folder else root.SCRATCH
    try:
        run = _Run(connection, request, dataclasses.replace(site, limits=limits), scratch)
        reply = run.wait()
    finally:
        if site.folder:
            shutil.rmtree(scratch, ignore_errors=True)
    if reply:
        content = json.dumps(reply).encode()
        connection.sendall(HEAD.pack(len(content)) + content)


def _receive(connection: socket.socket) -> bytes:
    """Reads one message. Raises EOFError if the other side hung up, ValueError for one that is too large."""
    (size,) = HEAD.unpack(receive_exactly(connection, HEAD.size))
    if size > MAX_REQUEST_BYTES:
        raise ValueError(f"a request of {size} bytes")
    return receive_exactly(connection, size)


class _Run:
    def __init__(self, connection: socket.socket, request: dict[str, str], site: Site, scratch: Path) -> None:
        self._connection, self._limits = connection, site.limits
        self._start_s = time.monotonic()
        self._lost = {**site.lost, **confine.leave_namespaces()}
        try:
            confine.forget_keys()
        except (OSError, KeyError) as error:
            self._lost["keys"] = str(error)
        self._streams = {name: bytearray() for name in ("stdout", "stderr", "status")}
        pipes = {name: os.pipe() for name in self._streams}
        self._reads = {read: name for name, (read, _) in pipes.items()}
        writes = {name: write for name, (_, write) in pipes.items()}
        stdin = os.memfd_create("stdin")
        with os.fdopen(os.dup(stdin), "wb") as file:
            file.write(request["stdin"].encode(errors="surrogatepass"))
        os.lseek(stdin, 0, os.SEEK_SET)
        self._init = os.fork()
        if self._init == 0:
            connection.close()
            for handle in self._reads:  # so that the pipes have no reader after the keeper's end
                os.close(handle)
            _run_init(request["code"], stdin, writes, dataclasses.replace(site, lost=self._lost), scratch)
        for handle in (stdin, *writes.values()):
            os.close(handle)
        self._num_dropped = 0
        self._is_over = False

    def wait(self) -> dict[str, object] | None:
        """Waits for the end and returns the reply; None if the caller hung up."""
        poll = select.poll()
        for handle in self._reads:
            poll.register(handle, select.POLLIN)
        poll.register(self._connection, select.POLLRDHUP)
        timed_out = False
        while self._reads:
            left_s = self._limits.timeout_s - (time.monotonic() - self._start_s)
            events = poll.poll(max(0.0, left_s) * 1000)
            if any(handle == self._connection.fileno() for handle, _ in events):
                self._kill()
                return None
            if left_s <= 0 and not timed_out:
                timed_out = not self._is_over
                self._kill()
            for handle, _ in events:
                self._read(handle, poll)
        self._kill()
        return self._result(timed_out)

    def _read(self, handle: int, poll: "select.poll") -> None:
        name, part = self._reads[handle], os.read(handle, _READ)
        if not part:
            poll.unregister(handle)
            os.close(handle)
            del self._reads[handle]
            if name == "status":  # processes that the code left may hold the others open
                self._kill()
            return
        kept = part[: max(0, self._limits.output_bytes - len(self._streams[name]))]
        self._streams[name] += kept
        self._num_dropped += len(part) - len(kept)

    def _kill(self) -> None:
        if self._is_over:  # another process may have its number by now
            return
        self._is_over = True
        confine.kill_descendants(self._init, shares_ids="pid" in self._lost)

    def _result(self, timed_out: bool) -> dict[str, object]:
        ended = json.loads(self._streams["status"] or b'{"signal": 9}')
        code, number = ended.get("exit_code"), ended.get("signal")
        return {
            "stdout": self._streams["stdout"].decode(errors="replace"),
            "stderr": self._streams["stderr"].decode(errors="replace"),
            "exit_code": code,
            "signal": signal.Signals(number).name if number else None,
            "timed_out": timed_out,
            "num_dropped_bytes": self._num_dropped,
            "seconds": time.monotonic() - self._start_s,
            "lost": {**self._lost, **ended.get("lost", {})},
        }


def _run_init(code: str, stdin: int, writes: dict[str, int], site: Site, scratch: Path) -> None:
    """Starts the code as the first process of the run, waits for it and reports its end. Never returns."""
    try:
        # The keeper has no number in this namespace.
        end_with_parent(signal.SIGKILL, lambda: _has_no_reader(writes["status"]))
        lost = {**site.lost, **_confine_mounts(site, scratch)}
        lost_read, lost_write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writes["status"])
            os.dup2(stdin, 0)
            os.dup2(writes["stdout"], 1)
            os.dup2(writes["stderr"], 2)
            _become_code(code, site.limits, scratch, lost_write)
        for handle in (stdin, writes["stdout"], writes["stderr"], lost_write):
            os.close(handle)
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == child:
                break
        lost.update(json.loads(os.read(lost_read, _READ) or b"{}"))
        end = {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"exit_code": os.WEXITSTATUS(status)}
        os.write(writes["status"], json.dumps({**end, "lost": lost}).encode())
    finally:
        os._exit(0)


def _has_no_reader(pipe: int) -> bool:
    """Returns whether all processes that could read from a pipe have ended. pipe: the end for writing."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _confine_mounts(site: Site, scratch: Path) -> dict[str, str]:
    """Mounts the run's own /proc and scratch folder; returns the guards that failed, with the reasons."""
    if "mounts" in site.lost:
        return {"scratch": "no mount namespace"}
    failures = {}
    steps = {"scratch": lambda: root.mount_scratch(scratch, site.limits.scratch_bytes), "proc": root.mount_proc}
    if site.folder:  # all files of the machine are visible
        steps = {"writes": lambda: root.make_read_only(Path("/")), **steps}
    for name, step in steps.items():
        try:
            step()
        except OSError as error:
            failures[name] = str(error.strerror)
    return failures


def _become_code(code: str, limits: CodeLimits, scratch: Path, lost_write: int) -> None:
    """Confines this process and runs the code. Never returns."""
    status = 1
    try:
        lost = {}
        os.chdir(scratch)
        steps = {
            "privileges": confine.drop_privileges,
            "writes": lambda: confine.allow_writes_in([scratch, Path("/dev/null")]),
            "calls": install_filter,
        }
        for name, step in steps.items():
            try:
                step()
            except (OSError, KeyError) as error:
                lost[name] = str(error)
        os.write(lost_write, json.dumps(lost).encode())
        os.closerange(3, _ALL_HANDLES)
        sys.path[:] = [path for path in sys.path if Path(path).exists()]
        os.environ.clear()
        os.environ.update(_ENVIRONMENT, HOME=str(scratch), TMPDIR=str(scratch))
        tempfile.tempdir = None
        confine.limit_resources(limits)
        status = _run_code(code)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run_code(code: str) -> int:
    """Runs code as `__main__` with the current standard streams, and returns its exit status.

    If the last statement is an expression, its value is printed, unless it is None.
    """
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - stays open
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.argv = [_CODE_NAME]
    linecache.cache[_CODE_NAME] = (len(code), None, code.splitlines(keepends=True), _CODE_NAME)
    status = 0
    try:
        _run(code)
    except SystemExit as error:
        status = _exit_status(error)
    except BaseException as error:  # noqa: BLE001 - any exception of the code is shown
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename != _CODE_NAME:  # skip the frames of this module
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does at its end
    atexit._run_exitfuncs()
    return status


def _run(code: str) -> None:
    tree = ast.parse(code, _CODE_NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(tree, _CODE_NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _CODE_NAME, "eval"), names)
        if value is not None:
            print(repr(value))  # noqa: T201 - output of the code


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201 - as an interpreter does
    return 1
