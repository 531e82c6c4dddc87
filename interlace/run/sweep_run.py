"""One run of a sweep: in the process of the sweep, or as `python -m interlace.run.sweep_run FOLDER [CORES]`.

The program trains the run of a folder whose settings were written before, and prints its outcome as JSON. CORES are the
numbers of the cores that it may use, with commas. It stops at the end of a step when its standard input is closed, so
that it ends with the process that started it.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import format_exception_only

from interlace.core.errors import InterlaceError, StoppedError
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.progress import ProgressView, QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_lock import RunLock
from interlace.observe.stop import StopSignal
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """End of one run."""

    is_finished: bool
    """False if the run was stopped before its last step, or failed."""
    error: str = ""
    """Error of a run that failed."""


def prepare_run(path: Path, recipe: Recipe) -> None:
    """Creates the folder of a run and writes its settings. A run with a checkpoint keeps its files.

    Raises UserError if another process trains the run.
    """
    if path.exists() and not _is_resumed(path):
        with RunLock(RunFolder(path=path)):
            shutil.rmtree(path)  # of a run that was killed before its first checkpoint
    is_new = not path.exists()
    open_folder = RunFolder.create if is_new else RunFolder.resume
    open_folder(path.parent, path.name).write_config(recipe)


def train_prepared(path: Path, recipe: Recipe, progress: ProgressView, stop: StopSignal) -> RunEnd:
    """Trains a run, from its newest checkpoint if it has one. An error is returned, so it affects no other run."""
    from interlace.run.train import train  # loads torch

    run = RunFolder.resume(path.parent, path.name)
    try:
        with RunLock(run):
            report = train(recipe, run, resume=_is_resumed(path), progress=progress, stop=stop)
    except StoppedError:  # nothing was saved: the resumed sweep starts this run again
        return RunEnd(is_finished=False)
    except InterlaceError as error:
        return RunEnd(is_finished=False, error="\n".join([str(error), *getattr(error, "__notes__", ())]))
    except Exception as error:  # noqa: BLE001 - an error of one run does not affect the others
        return RunEnd(is_finished=False, error="".join(format_exception_only(error)).strip())
    return RunEnd(is_finished=not report.was_interrupted)


def main() -> None:
    """Trains the run that the arguments name."""
    path, cores = Path(sys.argv[1]), sys.argv[2:]
    outcome = os.fdopen(os.dup(1), "w")  # which child processes do not inherit
    os.dup2(2, 1)  # the output of all processes of the run goes into its log
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, cores[0].split(",")))
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    with contextlib.redirect_stdout(sys.stderr), StopSignal(lambda: None) as stop:
        end = train_prepared(path, load_recipe(str(RunFolder(path=path).config)), QuietProgress(), stop)
    print(json.dumps(asdict(end)), file=outcome, flush=True)


def _is_resumed(path: Path) -> bool:
    return bool(Checkpoints(path / "checkpoints", keep=1).steps())


def _stop_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
