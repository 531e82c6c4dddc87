"""Preparations and output of a command: checks its output file, silences libraries, prints lines."""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.processes import read_stat

if TYPE_CHECKING:
    from rich.console import Console

    from interlace.observe.stop import StopSignal

_started_s: list[float] = []
"""Start of the process, if the process is a command."""


def note_start() -> None:
    """Records that this process is a command, whose start counts in limits of its time."""
    age_s = time.process_time()
    with contextlib.suppress(OSError):  # other systems than Linux have no such file
        started_s = int(read_stat("self")[19]) / os.sysconf("SC_CLK_TCK")
        age_s = max(age_s, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    _started_s[:] = [time.monotonic() - age_s]


def started_s() -> float:
    """Returns the time.monotonic() value at which this process started if it is a command, else the present one."""
    return _started_s[0] if _started_s else time.monotonic()


def disable_progress_bars() -> None:
    """Turns off the progress bars of transformers, which would break the lines of the live view.

    Sets an environment variable, which the library reads when a command imports it. A program may have imported it.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if transformers := sys.modules.get("transformers"):
        transformers.utils.logging.disable_progress_bar()


def say(console: "Console", text: str) -> None:
    """Prints text as it is, without markup, colours or line breaks of the console."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def writable(path: Path, option: str) -> Path:
    """Returns the path. Raises UserError if no file can be written there. option: name of the option, for messages."""
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}. Make it, or choose another file.")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder. Name a file, such as one in it.")
    beside = path.with_name(f"{path.name}.tmp")  # write_atomic() writes such a file first
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}. Choose another file.") from None
    return path


@contextlib.contextmanager
def keep_after_error(prefix: str, stop: "StopSignal") -> Iterator[Path]:
    """Makes a temporary folder. It is kept after an error, whose message may name its files, but not after a stop."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except BaseException:
        if stop.requested:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
