"""`interlace supervise`: trains in a separate process, which is started again after a signal killed it.

The kernel kills a process that lacks memory (SIGKILL), and an error in native code ends it (SIGSEGV, SIGABRT). No code
inside the process can recover from that.
"""

import ctypes
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from interlace.cli.complete import RecipeArgument, settings_argument
from interlace.cli.preflight import ROOT, say
from interlace.core.errors import UserError

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for the end of a command."""
_PR_SET_PDEATHSIG = 1


def supervise(
    recipe: RecipeArgument,
    overrides: Annotated[list[str] | None, settings_argument("Settings to change, as for train.")] = None,
    restarts: Annotated[int, typer.Option(min=1, help="Number of starts after a signal killed the process.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run of that name.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: the recipe's, numbered.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no tables.")] = False,
) -> None:
    """Train as `interlace train` does, and continue from the newest checkpoint after the process was killed."""
    from interlace.observe.checkpoints import Checkpoints
    from interlace.observe.run_folder import RunFolder, default_name, latest_name

    if resume and overwrite:
        raise UserError("--resume continues a run, --overwrite deletes it: give one of them.")
    stem = Path(recipe).stem
    run = name or (latest_name(ROOT, stem) if resume else default_name(ROOT, stem))
    folder = RunFolder.named(ROOT, run)
    before_ns = _read_time_ns(folder.config)
    common = ["--name", run, *(["--quiet"] if quiet else [])]
    option = ["--resume"] if resume else ["--overwrite"] if overwrite else []
    command = ["train", recipe, *(overrides or []), *common, *option]
    stopped: list[int] = []
    """Requests to stop, after which no process is started."""
    while (status := _run_process(command, stopped)) < 0 and not stopped and -status not in STOPS:
        killed = f"The run's process was killed by {signal.Signals(-status).name}."
        # Without a new configuration, the process ended before it opened its run. With one, all settings are stored.
        if _read_time_ns(folder.config) not in (None, before_ns):
            command = ["train", recipe, *common, "--resume"]
        if not restarts:
            again = shlex.join(["interlace", *command])
            say(Console(), f"{killed} No start is left (--restarts). To continue: {again}")
            break
        restarts -= 1
        saved = Checkpoints(folder.checkpoints, keep=1).steps()
        place = f"after step {saved[-1]}" if saved else "from the beginning, since there is no checkpoint"
        say(Console(), f"{killed} It continues {place}; {restarts} further starts are left.")
    raise typer.Exit(status if status >= 0 else 128 - status)


def _read_time_ns(file: Path) -> int | None:
    """Returns the time of the last change of a file. None if it does not exist."""
    return file.stat().st_mtime_ns if file.is_file() else None


def _run_process(arguments: Sequence[str], stopped: list[int]) -> int:
    """Runs a command to its end. Returns its exit status, or minus the number of the signal that killed it.

    stopped: gets the numbers of the signals that ask for an end meanwhile.
    """
    # A separate session gets each signal once: from here, and not from the terminal or a scheduler, too.
    command = [sys.executable, "-m", "interlace", *arguments]
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent)  # noqa: PLW1509 - no threads

    def forward(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in STOPS}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Makes the kernel ask this process to stop if the supervisor dies. Other systems than Linux do not offer this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
