"""`runs/<name>/`: all files that a run writes.

config.yaml        resolved settings, with masked secrets
secrets.yaml       the masked values, for a resumed run; mode 0600
recipe.yaml        the recipe as the user gave it, with masked secrets, which a resume compares
run.json           the id of the run, which its checkpoints record
warmup.json        the folder with the result of the run's warm-up
metrics.jsonl      one flat object per step
evaluations.jsonl  one object per evaluation on held-out prompts; step 0 is before the first step
timeline.json      Chrome trace of the newest process; traces of earlier processes are timeline-1.json ...
samples/           step_*.jsonl, one object per sample
checkpoints/       step_*/
videos/            step_*/, films and contact sheets of a robot's episodes; step 0 is before the first step
tensorboard/       event files, if TensorBoard is installed
report.html        of `interlace report`
comparison.html    of `interlace compare`, in the first run's folder
profile/           steps-10-12/, torch profiler traces of those steps (logging.trace_steps), one file per process
spaces.json        shapes of the observations and actions of a robot's simulators
process.json       lock of the process that trains the run (see run_lock.py)
"""

import contextlib
import re
import shutil
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Self, overload

from interlace.core.config import Config
from interlace.core.errors import UserError, nearest
from interlace.core.yaml_text import to_yaml
from interlace.observe.atomic_file import write_atomic
from interlace.observe.secrets import mask_secrets, write_secrets

ROOT = Path("runs")
"""Folder of the runs of a command."""
PRIVATE = 0o700
"""Mode of a run's folder: only the owner may read samples, settings and weights."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class _Within:
    """A path within the folder of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, run: None, owner: type["RunFolder"]) -> Self: ...
    @overload
    def __get__(self, run: "RunFolder", owner: type["RunFolder"]) -> Path: ...
    def __get__(self, run: "RunFolder | None", owner: type["RunFolder"]) -> Self | Path:
        return self if run is None else run.path / self._name


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The paths of one run."""

    path: Path
    config = _Within("config.yaml")
    metrics = _Within("metrics.jsonl")
    evaluations = _Within("evaluations.jsonl")
    timeline = _Within("timeline.json")
    samples = _Within("samples")
    checkpoints = _Within("checkpoints")
    videos = _Within("videos")
    traces = _Within("profile")
    advice = _Within("advice.json")
    """Suggestions of `interlace advise`, which the report shows."""
    engines = _Within("engines")
    """Logs and records of engine servers, and commands for the run's engines."""
    process = _Within("process.json")
    spaces = _Within("spaces.json")
    """Shapes of the observations and actions of a robot's simulators."""

    @classmethod
    def create(cls, root: Path, name: str, *, overwrite: bool = False) -> "RunFolder":
        """Creates a new folder. Raises UserError if the name is taken (unless `overwrite`) or cannot name a folder."""
        run = cls.named(root, name)
        if overwrite and run.path.exists():
            run._delete_content()
        try:
            root.mkdir(parents=True, exist_ok=True)
            run.path.mkdir(mode=PRIVATE, exist_ok=overwrite)  # If two runs start at once, only one creates it.
        except FileExistsError:
            if root.is_dir():
                raise UserError(
                    f"run {name!r} exists already ({run.path}). Continue it (--resume), replace it (--overwrite), "
                    f"or give this one another name (--name)."
                ) from None
        except OSError:
            pass  # An existing folder is reported below.
        run._make_folders()
        return run

    @classmethod
    def named(cls, root: Path, name: str) -> "RunFolder":
        """Returns the folder of a name, which need not exist. Raises UserError if the name cannot name a folder."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(
                f"run name {name!r} cannot name a folder. Give one (--name) of at most 200 of A-Z, a-z, 0-9, '.', "
                "'_', '-'."
            )
        return cls(path=root / name)

    @classmethod
    def resume(cls, root: Path, name: str) -> "RunFolder":
        """Returns the folder of a run to resume. Raises UserError if the run does not exist."""
        run = cls.named(root, name)
        if run.replaced.is_dir() and not run.path.exists():
            run.replaced.rename(run.path)  # the command that replaced it was killed before it made a folder
        if not run.config.exists():
            raise UserError(f"there is no run {name!r} to resume ({run.config} is missing). Start it without --resume.")
        run._make_folders()
        return run

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def has_no_files(self) -> bool:
        """Returns True for a folder without files, except the lock: a command that was stopped before it started."""
        return self.path.is_dir() and not any(path.is_file() and path != self.process for path in self.path.rglob("*"))

    @property
    def has_trained(self) -> bool:
        """Returns True if a step was logged."""
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    @property
    def replaced(self) -> Path:
        """The folder of the run that this one replaces. It exists until this run has trained a step."""
        return self.path.with_name(f".replaced-{self.name}")

    def set_aside(self) -> None:
        """Renames the folder of a run that another run replaces. See end_replacement(). Raises UserError."""
        self._check_replaceable()
        try:
            if self.replaced.exists() and not self.has_trained:
                shutil.rmtree(self.path)  # it replaced a run itself, and was killed before its first step
                return
            self.delete_replaced()
            self.path.rename(self.replaced)
            (self.replaced / self.process.name).unlink(missing_ok=True)
        except OSError as error:
            raise self._explain_not_replaced(error) from error

    @property
    def failed(self) -> Path:
        """The files of the last run that was to replace this one and ended before its first step, such as logs."""
        return self.path.with_name(f".failed-{self.name}")

    def delete_replaced(self) -> None:
        """Deletes the run that this one replaces, after a step of this one. Raises OSError."""
        for folder in (self.failed, self.replaced):
            if folder.exists():
                shutil.rmtree(folder)

    def end_replacement(self) -> None:
        """Takes the replaced run back if this one has ended before its first step. Its files move to `failed`."""
        if self.replaced.exists() and not self.has_trained:
            if self.path.exists():
                shutil.rmtree(self.failed, ignore_errors=True)
                self.path.rename(self.failed)
            self.replaced.rename(self.path)

    def write_config(self, config: Config) -> None:
        """Writes the resolved configuration with masked secrets, keys in the order of its fields.

        Secrets go to secrets.yaml, from which a resumed run reads them. Raises UserError if a file cannot be written;
        an earlier configuration is then unchanged.
        """
        settings, secrets = mask_secrets(config.model_dump(mode="json"))
        try:
            write_secrets(self.path, secrets)
            write_atomic(self.config, to_yaml(settings), synced=True)
        except OSError as error:
            raise UserError(
                f"cannot write {self.config}: {error.strerror}. A run needs a folder of its own."
            ) from error

    def _make_folders(self) -> None:
        path = self.path
        try:
            path.chmod(PRIVATE)
            for path in (self.samples, self.checkpoints):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the run folder {path}: {error.strerror}. Work in a folder that can be written."
            ) from error

    def _check_replaceable(self) -> None:
        """Raises UserError for a folder that is not a run's.

        Refuses a folder without config.yaml. Other programs have a config.yaml and a folder checkpoints too, so a run's
        folder must also have both folders that a run creates before its configuration.
        """
        is_run = self.config.exists() and self.samples.is_dir() and self.checkpoints.is_dir()
        if not self.path.is_dir() or not (is_run or self.has_no_files):
            raise UserError(
                f"{self.path} is not a run folder (a run has config.yaml and the folders samples and checkpoints), so "
                "it is not overwritten. Delete it yourself, or give this run another name (--name)."
            )
        if self.path.is_symlink():
            # The message of rmtree for a link differs between versions of Python.
            raise self._explain_not_replaced(OSError("it is a symbolic link"))

    def _explain_not_replaced(self, error: OSError) -> UserError:
        return UserError(
            f"cannot replace the run {self.path}: {error.strerror or error}. Delete it yourself, or give this one "
            "another name (--name)."
        )

    def _delete_content(self) -> None:
        """Deletes the folder's content except the lock. Raises the errors of _check_replaceable()."""
        self._check_replaceable()
        try:
            for path in self.path.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path != self.process:
                    path.unlink()
        except OSError as error:
            raise self._explain_not_replaced(error) from error


def set_timeline_aside(run: RunFolder) -> None:
    """Renames an existing timeline to a numbered file: a resumed run has a new clock and timeline."""
    if run.timeline.exists():
        names = [path.stem.removeprefix("timeline-") for path in run.path.glob("timeline-*.json")]
        number = 1 + max((int(name) for name in names if name.isdecimal()), default=0)  # one may have been deleted
        run.timeline.rename(run.path / f"timeline-{number}.json")


def default_name(root: Path, recipe: str) -> str:
    """Returns the recipe's name, or with a number from 2 if it is taken, so that a second `train` needs no new name."""
    recipe = folder_name(recipe)
    number = max((n for _, n in _list_numbered(root, recipe)), default=0) + 1
    return recipe if number == 1 else f"{recipe}-{number}"


def claim_name(root: Path, recipe: str) -> str:
    """Creates an empty folder with the name that default_name gives, and returns the name.

    Processes that start at once get different names. RunFolder.create(overwrite=True) takes the empty folder over.
    Raises UserError if no folder can be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            name = default_name(root, recipe)
            with contextlib.suppress(FileExistsError):  # taken since the names were listed
                (root / name).mkdir(mode=PRIVATE)
                return name
    except OSError as error:
        raise UserError(
            f"cannot make a run folder in {root}: {error.strerror}. Work in a folder that can be written."
        ) from error


def create_next_run(root: Path, recipe: str) -> RunFolder:
    """Creates the folder of a new run with the name that default_name gives. Raises the errors of claim_name."""
    return RunFolder.create(root, claim_name(root, recipe), overwrite=True)


def folder_name(text: str) -> str:
    """Converts any text to a folder's name: accents are dropped, other characters become `-`."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("._-")[:180] or "run"


def latest_name(root: Path, recipe: str) -> str:
    """Returns the newest run that default_name named, for --resume without a name. Raises UserError if none exists."""
    found = _list_numbered(root, folder_name(recipe))
    # A command claims its name as an empty folder before it writes the configuration.
    runs = [(name, number) for name, number in found if RunFolder(path=root / name).config.exists()]
    if not runs:
        raise UserError(f"there is no run of {recipe!r} under {root} to resume. Start it without --resume.")
    return max(runs, key=lambda run: run[1])[0]


def _list_numbered(root: Path, recipe: str) -> list[tuple[str, int]]:
    """Returns the existing names that default_name gives for a recipe, each with its number."""
    if not root.is_dir():
        return []
    matches = (re.fullmatch(rf"{re.escape(recipe)}(?:-(\d+))?", path.name) for path in root.iterdir())
    return [(match[0], int(match[1] or 1)) for match in matches if match]


def run_folder(spec: str, root: Path = ROOT) -> RunFolder:
    """Finds a run by its name or folder. root: folder of the runs. Raises UserError if it does not exist."""
    found = find_run(spec, root)
    if found is None:
        names = [folder.parent.name for folder in root.glob("[!.]*/config.yaml")]
        hint = nearest(spec, names) if names else ""
        raise UserError(f"{spec!r} is not a run: neither {spec} nor {root / spec} has a config.yaml.{hint}")
    return found


def find_run(spec: str, root: Path = ROOT) -> RunFolder | None:
    """Finds a run by its name or folder; None if it does not exist. root: folder of the runs."""
    folders = (RunFolder(path=path) for path in (Path(spec).expanduser(), root / spec))
    return next((folder for folder in folders if folder.config.is_file()), None)
