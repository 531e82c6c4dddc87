"""Checkpoints of a run: folders checkpoints/step_N, each complete or absent, of which the newest and the best are kept.

The caller defines the content. A checkpoint counts as complete when its folder has the final name; at that point the
checkpoint, its manifest and the files that it depends on are on disk.

Its manifest has the size and the checksum of each file, so that damage is detected before the files are used. The model
of a warm-up has one too. The checksum is BLAKE2b, as of the command `b2sum`. It is as fast as SHA-256 on processors
with SHA instructions, and twice as fast on others.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from interlace.core.config import Config
from interlace.core.errors import UserError, is_full_disk
from interlace.observe.atomic_file import sync_file, sync_folder
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


MANIFEST = "manifest.json"
MAX_THREADS = 8
"""Threads that read and hash concurrently."""


class FileRecord(Config):
    """Size and hash of a file when the folder was written."""

    num_bytes: int = Field(ge=0)
    blake2b: str
    """BLAKE2b hash of the whole file, hexadecimal."""


class Manifest(Config):
    """The files of a folder."""

    files: dict[str, FileRecord]
    """Path within the folder -> record of the file."""
    identity: CheckpointIdentity | None = None
    """Run, model and step, if the folder is a checkpoint of a run."""


def read_identity(folder: Path) -> CheckpointIdentity | None:
    """Reads the identity of a checkpoint; returns None if its manifest has none."""
    return Manifest.model_validate(_read_content(folder)).identity


def write_manifest(folder: Path, identity: CheckpointIdentity | None = None) -> None:
    """Writes the manifest of the files in a folder. identity: None keeps the identity of an existing manifest."""
    if identity is None and (folder / MANIFEST).is_file():
        with contextlib.suppress(OSError, ValueError):
            identity = read_identity(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = _compute_checksums(paths)
    records = {
        path.relative_to(folder).as_posix(): FileRecord(num_bytes=path.stat().st_size, blake2b=sums[path])
        for path in paths
    }
    manifest = Manifest(files=records, identity=identity)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def find_damage(folder: Path) -> str | None:
    """Compares a folder with its manifest. Returns the damage as half a sentence; None if there is none.

    Files that the manifest does not name are ignored.
    """
    try:
        expected = Manifest.model_validate(_read_content(folder)).files
    except FileNotFoundError:
        return f"has no {MANIFEST}, so it is not whole, or an earlier version of interlace wrote it"
    except (OSError, ValueError):
        return f"has a damaged {MANIFEST}"
    if missing := [name for name in expected if not (folder / name).is_file()]:
        return f"lacks {_format_names(missing)}"
    return _find_change(folder, expected)


def find_model_damage(folder: Path) -> str | None:
    """Compares the model in a folder with its manifest, as find_damage() does. Returns None also if there is no
    manifest.

    Checks the files next to the manifest, but no subfolders, such as a checkpoint's optimizer state. A copy may lack
    some files: the model's loader reports those. Another program's manifest.json is ignored.
    """
    try:
        content = _read_content(folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return f"has a damaged {MANIFEST}"
    try:
        expected = Manifest.model_validate(content).files
    except ValidationError:
        return None
    beside = {name: record for name, record in expected.items() if "/" not in name and (folder / name).is_file()}
    return _find_change(folder, beside)


def _read_content(folder: Path) -> object:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def _find_change(folder: Path, expected: Mapping[str, FileRecord]) -> str | None:
    cut = [name for name, record in expected.items() if (folder / name).stat().st_size != record.num_bytes]
    if cut:
        name = cut[0]
        return f"has {name} with {(folder / name).stat().st_size} of {expected[name].num_bytes} bytes"
    try:
        sums = _compute_checksums([folder / name for name in expected])
    except OSError as error:
        return f"cannot be read ({error})"
    changed = [name for name, record in expected.items() if sums[folder / name] != record.blake2b]
    return f"has other content than was written in {_format_names(changed)}" if changed else None


def _format_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _compute_checksums(paths: Sequence[Path]) -> Mapping[Path, str]:
    """Hashes files in parallel, the largest first; hashing releases the interpreter lock."""
    ordered = sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(ordered, pool.map(_compute_checksum, ordered), strict=True))


def _compute_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
