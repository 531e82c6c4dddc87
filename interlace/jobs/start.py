"""The place from which a process of a run starts: step 0, or the newest checkpoint that is whole."""

from dataclasses import dataclass
from pathlib import Path

from interlace.core.errors import UserError
from interlace.jobs.evaluation import Evaluation
from interlace.jobs.state import RunState
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.progress import ProgressView
from interlace.observe.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """Start of one process of a run."""

    checkpoint: Path | None = None
    """None for the start of the whole run."""
    state: RunState | None = None
    """State of the run in that checkpoint."""

    @property
    def done_steps(self) -> int:
        """Returns the steps that other processes did before."""
        return self.state.done_steps if self.state else 0

    @property
    def before(self) -> Evaluation | None:
        """Returns the evaluation before the first step, where it was made already."""
        return self.state.before if self.state else None


def resumed_start(folder: RunFolder, checkpoints: Checkpoints, progress: ProgressView) -> RunStart:
    """Cuts a run's logs back to the newest checkpoint that is whole, and starts there; from step 0 where none is.

    Checkpoints that are damaged are set aside, and `progress` says so. Raises UserError where all are.
    """
    newest = _newest_whole(folder, checkpoints, progress)
    start = RunStart(checkpoint=newest, state=RunState.read(newest) if newest else None)
    for lost in folder.return_to(start.done_steps, newest):
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
