"""`interlace supervise`: trains in a separate process, which is started again after a signal killed it.

The kernel kills a process that lacks memory (SIGKILL), and an error in native code ends it (SIGSEGV, SIGABRT). No code
inside the process can recover from that.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from interlace.cli.preflight import RecipeArgument, say, settings_argument
from interlace.core.processes import adopt_orphans, end_with, kill_processes, list_children, read_command
from interlace.observe.run_folder import ROOT, RunFolder, claim_name, latest_name

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for the end of a command."""
FIRST_DELAY_S, MOST_DELAY_S = 1.0, 60.0
"""Seconds before the first restart, doubled for each further one, and their maximum."""
ENDING_S, POLL_S = 30.0, 0.1
"""Seconds for the remaining processes of a killed run to end, after which they are killed, and between two checks."""


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
    from interlace.observe.run_start import check_choice, how_to_continue

    check_choice(resume=resume, overwrite=overwrite)
    stem, is_claimed = Path(recipe).stem, name is None and not resume
    run = name or (claim_name(ROOT, stem) if is_claimed else latest_name(ROOT, stem))
    folder = RunFolder.named(ROOT, run)
    before_ns, others = _read_time_ns(folder.config), {*list_children()}
    common = ["--name", run, *(["--quiet"] if quiet else [])]
    option = ["--resume"] if resume else ["--overwrite"] if overwrite or is_claimed else []
    command = ["train", recipe, *(overrides or []), *common, *option]
    stopped: list[int] = []
    """Requests to stop, after which no process is started."""
    delay_s = FIRST_DELAY_S
    while (status := _run_process(command, stopped)) < 0 and not stopped and -status not in STOPS:
        killed = f"The run's process was killed by {signal.Signals(-status).name}."
        # Without a new configuration, the process ended before it opened its run. With one, all settings are stored.
        if _read_time_ns(folder.config) not in (None, before_ns):
            command = ["train", str(folder.config), *common, "--resume"]
        if not restarts:
            say(Console(), f"{killed} No start is left (--restarts). {how_to_continue(folder)}")
            break
        restarts -= 1
        saved = Checkpoints(folder.checkpoints, keep=1).steps()
        place = f"after step {saved[-1]}" if saved else "from the beginning, since there is no checkpoint"
        say(Console(), f"{killed} It continues {place}; {restarts} further starts are left.")
        _wait_for_end(delay_s, others, folder, stopped)
        if stopped:
            break
        delay_s = min(2 * delay_s, MOST_DELAY_S)
    if is_claimed and not folder.config.exists():
        with contextlib.suppress(OSError):  # a folder with files stays
            folder.path.rmdir()
    raise typer.Exit(status if status >= 0 else 128 - status)


def _read_time_ns(file: Path) -> int | None:
    """Returns the time of the last change of a file. None if it does not exist."""
    return file.stat().st_mtime_ns if file.is_file() else None


def _run_process(arguments: Sequence[str], stopped: list[int]) -> int:
    """Runs a command to its end. Returns its exit status, or minus the number of the signal that killed it.

    stopped: gets the numbers of the signals that ask for an end meanwhile.
    """
    adopt_orphans()  # if the command is killed, its own processes become children of this one
    # A separate session gets each signal once: from here, and not from the terminal or a scheduler, too.
    command = [sys.executable, "-m", "interlace", *arguments]
    supervisor = os.getpid()
    process = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=lambda: end_with(supervisor, signal.SIGTERM),  # noqa: PLW1509 - no threads
    )

    def forward(number: int) -> None:
        stopped.append(number)
        process.send_signal(number)

    with _received_signals(forward):
        return process.wait()


def _wait_for_end(delay_s: float, others: Collection[int], run: "RunFolder", stopped: list[int]) -> None:
    """Waits for a time, and until the processes of the killed command have ended, which may still hold its devices.

    After ENDING_S the remaining ones are killed. others: children of this process that are not of the command. run: its
    servers stay, because the next process of the run adopts them. stopped: as for _run_process(); a signal ends the
    wait.
    """
    started_s = time.monotonic()
    with _received_signals(stopped.append):
        while not stopped:
            left, passed_s = _list_orphans(others, run), time.monotonic() - started_s
            if not left and passed_s >= delay_s:
                return
            if passed_s > ENDING_S:
                kill_processes(left)
            time.sleep(POLL_S)


def _list_orphans(others: Collection[int], run: "RunFolder") -> list[int]:
    """Returns the PIDs of the adopted processes that run, except the guards of a run's servers. See _wait_for_end()."""
    found = []
    for process in list_children():
        with contextlib.suppress(ChildProcessError):
            if process in others or os.waitpid(process, os.WNOHANG)[0] != 0:
                continue
            if not _is_guard(process, run):
                found.append(process)
    return found


def _is_guard(process: int, run: "RunFolder") -> bool:
    """Returns True for the guard of a server of the run: its command line contains a record of the run.

    The record may have got another number since the start of the guard.
    """
    from interlace.engines.rollout.services.lease import read_number

    records = [Path(argument) for argument in read_command(process).split("\0")]
    return any(record.parent == run.engines.absolute() and read_number(record) is not None for record in records)


@contextmanager
def _received_signals(receive: Callable[[int], object]) -> Iterator[None]:
    """Calls a function with each signal that asks for an end, instead of the signal's effect."""

    def handle(number: int, _frame: FrameType | None) -> None:
        receive(number)

    before = {number: signal.signal(number, handle) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
