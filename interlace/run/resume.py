"""Start of a process of a run: step 0, or the newest complete checkpoint."""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from interlace.core.errors import UserError
from interlace.core.types import JSON
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.manifest import read_identity
from interlace.observe.progress import ProgressView
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import RunIdentity, check_changed_settings, create_run_id, read_run_id
from interlace.observe.run_logs import RunLogs
from interlace.observe.run_sessions import record_session
from interlace.rewards.config import GIVEN
from interlace.run.evaluation import Evaluation
from interlace.run.memory_checkpoints import MemoryCheckpoints
from interlace.run.recipe.config import Recipe
from interlace.run.state import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """Starting point of one process of a run."""

    checkpoint: Path | None = None
    """Checkpoint to resume from; None at the start of the whole run."""
    state: RunState | None = None
    """State of the run in the checkpoint."""

    @property
    def done_steps(self) -> int:
        """Returns the number of steps done by earlier processes."""
        return self.state.done_steps if self.state else 0

    @property
    def before(self) -> Evaluation | None:
        """Returns the evaluation before the first step, if an earlier process made it."""
        return self.state.before if self.state else None


def identify_run(recipe: Recipe, folder: RunFolder, *, resume: bool) -> RunIdentity:
    """Makes the identity of a new run, or reads the identity of a resumed one.

    Records this process in the run's sessions. If the file with the id is lost, the id of the newest checkpoint with a
    readable manifest is used.
    """
    run = read_run_id(folder.path) if resume else None
    checkpoints = Checkpoints(folder.checkpoints, keep=1)
    for step in reversed(checkpoints.steps()) if run is None and resume else ():
        with contextlib.suppress(OSError, ValueError):
            found = read_identity(checkpoints.path(step))
            run = run or (found.run if found else None)
    record_session(folder.path, sys.argv)
    return RunIdentity(run=run or create_run_id(folder.path), model=recipe.model.path)


def find_resumed_start(
    folder: RunFolder,
    checkpoints: Checkpoints,
    memory: MemoryCheckpoints,
    progress: ProgressView,
    settings: Mapping[str, JSON],
    *,
    has_samples: bool,
) -> RunStart:
    """Truncates a run's logs to its newest complete checkpoint and starts there; from step 0 if there is none.

    memory: checkpoints of this command in shared memory, of which a newer one is used. settings: the settings of the
    resumed run, with secrets masked. has_samples: whether its steps write samples. Damaged checkpoints are set aside,
    and `progress` shows them and the changed settings. Raises UserError if all are damaged, if the newest complete one
    belongs to another run, model or step, or if a changed setting would make the resumed run another run.
    """
    newest = memory.find_newer(checkpoints) or _newest_whole(folder, checkpoints, progress)
    for change in check_changed_settings(newest, settings, program_names=GIVEN) if newest else ():
        progress.say(f"changed since {newest}: {change}")
    start = RunStart(checkpoint=newest, state=RunState.read(newest) if newest else None)
    for lost in RunLogs(folder).return_to(start.done_steps, newest, has_samples=has_samples):
        progress.say(lost)
    if newest:
        progress.say(f"resuming after step {start.done_steps} from {newest}")
    return start


def _newest_whole(folder: RunFolder, checkpoints: Checkpoints, progress: ProgressView) -> Path | None:
    found = checkpoints.newest_whole()
    damage = [f"{path} {reason}" for path, reason in found.damaged.items()]
    if damage and found.path is None:
        raise UserError(
            f"run {folder.name!r} has no whole checkpoint to go on from: {'; '.join(damage)}. Start it again "
            "without --resume: with --overwrite, or under another name (--name)."
        )
    for path, sentence in zip(found.damaged, damage, strict=True):
        progress.say(f"{sentence}; set aside as {checkpoints.set_aside(path).name}")
    return found.path
