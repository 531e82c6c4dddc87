"""Checkpoints of a run: folders checkpoints/step_N, each complete or absent, of which the newest and the best are kept.

The caller defines the content. A checkpoint counts as complete when its folder has the final name; at that point the
checkpoint, its manifest and the files that it depends on are on disk.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from interlace.core.errors import UserError, is_full_disk
from interlace.observe.atomic_file import sync_file, sync_folder
from interlace.observe.manifest import find_damage, read_identity, write_manifest
from interlace.observe.run_identity import CheckpointIdentity, RunIdentity, check_identity

_STEP = re.compile(r"step_(\d+)")
_UNFINISHED = ".tmp-"
_DAMAGED = "damaged-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Checkpoint to resume from, and the newer ones that are damaged."""

    path: Path | None
    """The newest undamaged checkpoint; None if there is none."""
    damaged: Mapping[Path, str]
    """Newer checkpoint -> description of its damage, as half a sentence."""


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, *, keep: int, run: RunIdentity | None = None) -> None:
        """keep: number of newest checkpoints to keep; a number below 1 raises UserError.

        run: the run that owns the folder. Its checkpoints record it, and a checkpoint of another run is refused.
        """
        if keep < 1:
            raise UserError(f"{keep} checkpoints kept would leave nothing to resume from. Keep 1 or more.")
        self._folder = folder
        self._keep, self._run = keep, run
        self._best: int | None = None
        """Step of the best checkpoint that is kept."""
        self._next_best: int | None = None
        """Best step, whose checkpoint may not be written yet."""
        self._start: int | None = None
        """Step whose checkpoint this process started from."""

    def save(self, step: int, write: Callable[[Path], None], *, num_bytes: int) -> Path:
        """Writes the checkpoint of a step and returns its folder; an existing one is complete and stays unchanged.

        write: fills the given folder, and syncs the files outside it that the checkpoint depends on. num_bytes: needed
        space, checked before anything is written. Raises UserError if the disk is full; earlier checkpoints stay
        unchanged.
        """
        final = self.path(step)
        if final.exists():
            return final
        self._folder.mkdir(parents=True, exist_ok=True)
        for remains in self._folder.glob(f"{_UNFINISHED}*"):  # half written or half deleted by a killed run
            shutil.rmtree(remains)
        free = shutil.disk_usage(self._folder).free
        if free < num_bytes:
            raise UserError(
                f"{self._no_space(step)}: it needs {_format_mebibytes(num_bytes)}, {_format_mebibytes(free)} are free."
            )
        unfinished = self._folder / f"{_UNFINISHED}{final.name}"
        unfinished.mkdir()
        try:
            write(unfinished)
            write_manifest(unfinished, self._identity(step))
            _sync_all(unfinished)
        except (OSError, UserError) as error:
            shutil.rmtree(unfinished)
            if not is_full_disk(error):
                raise
            raise UserError(f"{self._no_space(step)}: it filled up while the checkpoint was written.") from error
        unfinished.rename(final)
        sync_folder(self._folder)
        if step == self._next_best:
            self._best = step
        self._prune_old()
        return final

    def keep_best(self, step: int | None) -> None:
        """Keeps the checkpoint of the best step in addition to the newest ones, and no longer an earlier best one.

        step: None if no step is the best. The checkpoint may be written later; the earlier best one is kept until then.
        """
        self._next_best = step
        if step is None:
            self._best = None
        elif step in self.steps():
            self._best = step
            self._prune_old()

    def keep_start(self, step: int | None) -> None:
        """Keeps the checkpoint that this process started from in addition: new processes of a role load their model
        from it. None at the end of the process.
        """
        self._start = step
        if step is None:
            self._prune_old()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, oldest first."""
        if not self._folder.is_dir():
            return []
        matches = (_STEP.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint, whether or not it exists."""
        return self._folder / f"step_{step}"

    def newest_whole(self) -> Found:
        """Finds the newest undamaged checkpoint to resume from; reads all files of each candidate, from the newest.

        Raises UserError if that checkpoint is of another run, model or step.
        """
        damaged: dict[Path, str] = {}
        for step in reversed(self.steps()):
            path = self.path(step)
            damage = find_damage(path)
            if damage is None:
                if self._run:
                    check_identity(path, read_identity(path), self._run)
                return Found(path=path, damaged=damaged)
            damaged[path] = damage
        return Found(path=None, damaged=damaged)

    def _identity(self, step: int) -> CheckpointIdentity | None:
        return CheckpointIdentity(run=self._run.run, model=self._run.model, step=step) if self._run else None

    def set_aside(self, path: Path) -> Path:
        """Renames a damaged checkpoint, so that its step can be written again. Returns the new path."""
        aside = path.with_name(f"{_DAMAGED}{path.name}")
        if aside.exists():
            shutil.rmtree(aside)
        return path.rename(aside)

    def latest(self) -> Path | None:
        """Returns the newest checkpoint, damaged or not."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def check_num_steps(self, num_steps: int) -> None:
        """Raises UserError if a resumed run with this number of steps would end before its newest checkpoint."""
        done = max(self.steps(), default=0)
        if num_steps < done:
            raise UserError(
                f"steps={num_steps}, but {self._folder.parent} has trained {done} already: give {done} or more."
            )

    def _no_space(self, step: int) -> str:
        latest = self.latest()
        kept = f" ({latest.name} is whole; make room, then --resume)" if latest else ""
        return f"no space under {self._folder} for the checkpoint of step {step}{kept}"

    def _prune_old(self) -> None:
        for step in self.steps()[: -self._keep]:
            if step in (self._best, self._start):
                continue
            # Renamed first: an interrupted deletion must not leave a folder that looks complete.
            doomed = self._folder / f"{_UNFINISHED}old-step_{step}"
            self.path(step).rename(doomed)
            shutil.rmtree(doomed)


def _sync_all(folder: Path) -> None:
    """Syncs files and folders to disk, so that after a power cut a folder with a final name is complete."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)


def _format_mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
