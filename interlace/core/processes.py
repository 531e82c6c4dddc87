"""Processes of this machine: parents, children and descriptions. On other systems than Linux, most are unknown.

Standard library only: the fork server of the sandbox and the guards of engine servers import it.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent(number: int, has_ended: Callable[[], bool]) -> None:
    """Makes the kernel send a signal to this process when its parent ends. Ends it at once if the parent has ended.

    has_ended: returns whether the parent has ended. It is called after the request, because the kernel sends no signal
    for an earlier end. On other systems than Linux, no signal is sent.
    """
    _send_at_end_of_parent(number)
    if has_ended():
        os._exit(1)


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Calls end_with_parent() for the parent with a process number, which must be in the namespace of this process."""
    end_with_parent(number, lambda: os.getppid() != parent)


def continue_after_parent() -> None:
    """Makes the kernel continue this process after the end of its parent, if a signal has stopped it.

    A stopped process does not notice the end of its run, and would stay for ever.
    """
    _send_at_end_of_parent(signal.SIGCONT)


def end_command_with_parent(command: Sequence[str]) -> list[str]:
    """Returns a command whose process, without its own children, the kernel kills when the calling thread ends.

    util-linux's `setpriv` sets the signal between fork and exec. Python code there could deadlock in a process with
    threads. The command is unchanged if this system has no such `setpriv`, and if its program does not exist.
    """
    return [*_death_signal(), *command] if shutil.which(command[0]) else list(command)


def is_start_failure(status: int, errors: str) -> bool:
    """Returns whether `setpriv` could not execute a command, such as a script without its interpreter.

    errors: standard error of the process.
    """
    return status in (126, 127) and errors.startswith("setpriv: ")


@cache
def _death_signal() -> tuple[str, ...]:
    """Returns the words before a command that ends with its parent. Empty if `setpriv` lacks the option (RHEL 8)."""
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    if setpriv is None:
        return ()
    words = (setpriv, "--pdeathsig", "KILL")
    return words if subprocess.run([*words, "true"], check=False, capture_output=True).returncode == 0 else ()


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent ended. Does nothing on other systems than Linux."""
    if sys.platform == "linux":
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _send_at_end_of_parent(number: int) -> None:
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, number)


def prctl(option: int, value: int = 0) -> None:
    """Calls prctl(2). Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")


def list_children(process: int | None = None) -> list[int]:
    """Returns the children of a process (None: this one). Empty if it has ended or the system does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for listed in Path(f"/proc/{process or 'self'}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread has ended
                found += map(int, listed.read_text(encoding="ascii").split())
    return found


def read_name(process: int) -> str:
    """Returns the command name of a process. Empty if it has ended."""
    return _read(process, "comm").strip()


def read_command(process: int) -> str:
    """Returns the command line of a process, whose arguments end with a null character. Empty if it has ended."""
    return _read(process, "cmdline")


def read_stat(process: int | str) -> list[str]:
    """Returns the fields of /proc/PROCESS/stat after the name: state, parent, group, ... Raises OSError."""
    return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def read_start(process: int) -> str:
    """Returns the start of a process, in ticks of the clock since the start of the system.

    Two processes with one number differ in it. Empty if the process has ended, and on systems without /proc.
    """
    try:
        return read_stat(process)[19]
    except OSError:
        return ""


def is_stopped(process: int) -> bool:
    """Returns whether a signal has stopped a process (SIGSTOP). Always False on systems without /proc."""
    try:
        return read_stat(process)[0] == "T"
    except OSError:
        return False


def kill_processes(processes: Iterable[int]) -> None:
    """Sends SIGKILL to the processes that have not ended."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def kill_if_stopped(process: int | None) -> bool:
    """Kills a process that a signal has stopped, because it would never answer. Returns whether it did."""
    if process is None or not is_stopped(process):
        return False
    kill_processes([process])
    return True


def name_own_folder(prefix: str) -> str:
    """Returns PREFIXPROCESS-NAMESPACE-SECRET, a name of a folder of this process that another user cannot guess."""
    return f"{prefix}{os.getpid()}-{_read_namespace()}-{secrets.token_hex(8)}"


def remove_left_folders(parent: Path, prefix: str) -> None:
    """Removes the folders in `parent`, named by name_own_folder(), whose process has ended.

    Leaves those of other containers, which number their processes on their own. Does nothing on systems without /proc.
    """
    for left in parent.glob(f"{prefix}*-{_read_namespace()}-*") if Path("/proc/self").exists() else ():
        owner = left.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _read_namespace() -> str:
    """Returns the number of the namespace of process numbers, 0 on systems without /proc."""
    try:
        return Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return "0"


def _read(process: int, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
