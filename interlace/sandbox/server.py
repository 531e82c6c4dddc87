"""The fork server: a warm Python process that forks once for each run of code.

A run is three processes. The *keeper*, outside the namespaces, reads the request, keeps the time and gathers output.
The *init* is the first process in the namespace of ids: with it all others end. The *code* is confined, and runs.
Started as `python -m interlace.sandbox.server LIMITS MODULES`; it ends when its standard input does.
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path

from interlace.sandbox import confine
from interlace.sandbox.code import run_code
from interlace.sandbox.limits import CodeLimits

HEAD = struct.Struct("<Q")
"""Before a request and a reply, which are JSON: the size in bytes."""
_READ = 1 << 16


def main() -> None:
    """Serves until standard input ends, which is when the process that started it has."""
    limits, modules = CodeLimits(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
    for module in modules:
        importlib.import_module(module)
    folder = Path(tempfile.mkdtemp(prefix="interlace-sandbox-"))
    try:
        if os.getuid() == 0:
            os.chown(folder, confine.NO_USER, confine.NO_USER)
        try:
            confine.drop_root([Path(name).resolve() for name in {sys.prefix, sys.base_prefix, *sys.path} if name])
        except OSError as error:
            _say({"error": f"root could not become user {confine.NO_USER}: {error.strerror}"})
            return
        (folder / "outside").mkdir(mode=0o777)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "server"))
            listener.listen(1024)
            gc.freeze()  # what was imported is shared with the children, not copied
            _say({"folder": str(folder)})
            _serve(listener, folder, limits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say(words: dict[str, str]) -> None:
    """Tells the process that started this one, in a line of JSON."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def _serve(listener: socket.socket, folder: Path, limits: CodeLimits) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to decide on
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no wait
    while True:
        ready, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in ready and not os.read(0, _READ):
            return
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _keep(connection, folder, limits)
            connection.close()


def _keep(connection: socket.socket, folder: Path, limits: CodeLimits) -> None:
    """Runs one request, in a process of its own. Never returns."""
    try:
        _answer(connection, folder, limits)
    finally:
        os._exit(0)


def _answer(connection: socket.socket, folder: Path, limits: CodeLimits) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    confine.die_with_parent()
    confine.adopt_orphans()
    request = json.loads(receive(connection))
    limits = dataclasses.replace(limits, timeout_s=min(limits.timeout_s, request.get("timeout_s") or limits.timeout_s))
    scratch = Path(tempfile.mkdtemp(dir=folder))
    try:
        reply = _Run(connection, request, limits, scratch).reply()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if reply:
        content = json.dumps(reply).encode()
        connection.sendall(HEAD.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes:
    """Reads one message. EOFError where the other side has gone."""
    (size,) = HEAD.unpack(_exactly(connection, HEAD.size))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), 1 << 20))
        if not part:
            raise EOFError
        content += part
    return bytes(content)


class _Run:
    """One run of code, seen by its keeper."""

    def __init__(self, connection: socket.socket, request: dict[str, str], limits: CodeLimits, scratch: Path) -> None:
        self._connection, self._limits = connection, limits
        self._start_s = time.monotonic()
        self._lost = confine.leave_namespaces()
        self._streams = {name: bytearray() for name in ("stdout", "stderr", "status")}
        pipes = {name: os.pipe() for name in self._streams}
        self._reads = {read: name for name, (read, _) in pipes.items()}
        writes = {name: write for name, (_, write) in pipes.items()}
        stdin = os.memfd_create("stdin")
        os.write(stdin, request["stdin"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        self._init = os.fork()
        if self._init == 0:
            connection.close()
            _init(request["code"], stdin, writes, (limits, scratch, self._lost))
        for handle in (stdin, *writes.values()):
            os.close(handle)
        self._num_dropped = 0
        self._is_over = False

    def reply(self) -> dict[str, object] | None:
        """Waits for the end. None where nothing is asked any more."""
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
            if not events and not timed_out:
                timed_out = True
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
            if name == "status":  # what the code left behind may hold the others open
                self._kill()
            return
        kept = part[: max(0, self._limits.output_bytes - len(self._streams[name]))]
        self._streams[name] += kept
        self._num_dropped += len(part) - len(kept)

    def _kill(self) -> None:
        if self._is_over:  # its number may be another's by now
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


def _init(code: str, stdin: int, writes: dict[str, int], site: tuple[CodeLimits, Path, dict[str, str]]) -> None:
    """Is the first process of the run: starts the code, waits for it, says how it ended. Never returns."""
    try:
        confine.die_with_parent()
        limits, scratch, lost = site
        lost = {**lost, **_confine_mounts(limits, scratch, lost)}
        lost_read, lost_write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writes["status"])
            os.dup2(stdin, 0)
            os.dup2(writes["stdout"], 1)
            os.dup2(writes["stderr"], 2)
            _become_code(code, limits, scratch, lost_write)
        for handle in (stdin, writes["stdout"], writes["stderr"], lost_write):
            os.close(handle)
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == child:
                break
        lost.update(json.loads(os.read(lost_read, _READ) or b"{}"))
        how = {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"exit_code": os.WEXITSTATUS(status)}
        os.write(writes["status"], json.dumps({**how, "lost": lost}).encode())
    finally:
        os._exit(0)


def _confine_mounts(limits: CodeLimits, scratch: Path, lost: dict[str, str]) -> dict[str, str]:
    if "mounts" in lost:
        return {"scratch": "no mount namespace", "proc": "no mount namespace"}
    failures = {}
    steps = {
        "mounts": confine.make_mounts_read_only,
        "scratch": lambda: confine.mount_scratch(scratch, limits.scratch_bytes),
        "proc": confine.mount_proc,
    }
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
            "privileges": confine.renounce_privileges,
            "writes": lambda: confine.allow_writes_in([scratch, Path("/dev/null")]),
        }
        for name, step in steps.items():
            try:
                step()
            except (OSError, KeyError) as error:
                lost[name] = str(error)
        os.write(lost_write, json.dumps(lost).encode())
        os.closerange(3, 1024)
        os.environ.clear()
        os.environ.update(HOME=str(scratch), TMPDIR=str(scratch), PATH="/usr/bin:/bin", LANG="C.UTF-8")
        tempfile.tempdir = None
        confine.limit_resources(limits)
        status = run_code(code)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
