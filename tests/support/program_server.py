"""The fork server of tests.support.programs: imports the libraries once, then forks one process per program."""

import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = (
    "interlace.api.run",
    "interlace.cli.main",
    "interlace.run.clusters.local",
    "interlace.run.launch",
    "interlace.run.offline",
    "interlace.workers.actor",
    "interlace.workers.actor_critic",
    "interlace.workers.rollout",
    "reasoning_gym",
    "torch",
    "transformers.convert_slow_tokenizer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)
"""Modules that most programs import."""
MAX_BYTES = 1 << 20


def serve(connection: socket.socket) -> list[str]:
    """Forks programs until the tests have ended. Returns the arguments of Python in each forked process."""
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([connection, wake], [], [])
        if wake in ready:
            os.read(wake, MAX_BYTES)
            _report_ended(running)
        if connection in ready:
            content, handles, _, _ = socket.recv_fds(connection, MAX_BYTES, 8)
            if not content:
                raise SystemExit
            ending, *streams = handles
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for handle in (wake, waker, ending, connection.detach(), *[end.detach() for end in running.values()]):
                    os.close(handle)
                return _become_program(json.loads(content), streams)
            for handle in streams:
                os.close(handle)
            running[pid] = socket.socket(fileno=ending)
            connection.send(str(pid).encode())


def _report_ended(running: dict[int, socket.socket]) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with running.pop(found[0]) as ending, suppress(OSError):
                ending.send(str(found[1]).encode())


def _become_program(asked: dict[str, Any], streams: list[int]) -> list[str]:
    """Sets the process's folder, environment, streams and signals. Returns the arguments of Python."""
    for target, handle in enumerate(streams):
        os.dup2(handle, target)
    for handle in streams:
        os.close(handle)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdout", "stderr"), 1):
        raw = io.FileIO(number, "w", closefd=False)
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), "utf-8", errors, line_buffering=name == "stderr", write_through=is_unbuffered
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return list(asked["arguments"])


def run_as_main(arguments: list[str]) -> None:
    """Runs `-c CODE ...`, `-m MODULE ...` or `SCRIPT ...` as Python does."""
    kind, *rest = arguments
    root = sys.path[0]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    folder = "" if kind == "-c" else str(Path.cwd()) if kind == "-m" else str(Path(kind).parent.absolute())
    sys.path[:1] = [folder, root, *added]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        main = types.ModuleType("__main__")
        main.__file__ = kind
        sys.modules["__main__"] = main
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


if __name__ == "__main__":
    for module in MODULES:
        __import__(module)
    gc.freeze()  # a collection in a program would otherwise copy the pages of all modules
    run_as_main(serve(socket.socket(fileno=int(sys.argv[1]))))
