"""Identity of a run and of its checkpoints, and the settings that a resumed run may change."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.flat_settings import flatten_settings
from interlace.core.yaml_text import read_mapping, to_yaml

if TYPE_CHECKING:
    from interlace.core.types import JSON


CHANGEABLE = (
    "steps", "checkpoint_every", "eval_every", "keep_checkpoints", "best", "logging", "cluster",
    "actor.ranks", "critic.ranks", "actor.reshard", "critic.reshard", "model.cache_dir",
    "recovery.restarts_per_hour", "recovery.restarts_in_a_row", "recovery.memory_checkpoint_every",
)  # fmt: skip
"""Settings that a resumed run may change and still be the same run."""
RUN_FILE = "run.json"
SETTINGS_FILE = "settings.yaml"
"""Copy of the settings in a checkpoint."""


class RunIdentity(Config):
    """A run, and the model that it trains."""

    run: str
    """Random id, made at the start of the run."""
    model: str
    """Path of the model as the recipe gives it: a hub id, a folder or a built-in name."""


class CheckpointIdentity(RunIdentity):
    """The run, model and step of a checkpoint."""

    step: int


def create_run_id(folder: Path) -> str:
    """Makes the id of a new run and writes it to the run's folder."""
    run = uuid.uuid4().hex
    (folder / RUN_FILE).write_text(json.dumps({"run": run}) + "\n", encoding="utf-8")
    return run


def read_run_id(folder: Path) -> str | None:
    """Reads the id of a run; returns None if the file is missing or damaged."""
    try:
        return str(json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_identity(path: Path, found: CheckpointIdentity | None, wanted: RunIdentity) -> None:
    """Raises UserError if a checkpoint in a run's folder is of another run, model or step."""
    step = int(path.name.removeprefix("step_"))
    if found is None:
        wrong = "does not record its run, model and step"
    elif found.run != wanted.run:
        wrong = f"belongs to another run (its id is {found.run}; the id of this run is {wanted.run})"
    elif follow_moved_file(found.model, _runs_of(path)) != follow_moved_file(wanted.model, _runs_of(path)):
        wrong = f"holds another model ({found.model!r}; this run trains {wanted.model!r})"
    elif found.step != step:
        wrong = f"was written at step {found.step} and renamed"
    else:
        return
    raise UserError(
        f"{path} {wrong}, so it is no checkpoint of this run. Move it out of the run's folder to use an earlier "
        f"checkpoint, or start a new run from its weights: model={path}."
    )


def write_settings(folder: Path, settings: Mapping[str, JSON]) -> None:
    """Writes the masked settings of a run into a checkpoint."""
    (folder / SETTINGS_FILE).write_text(to_yaml(dict(settings)), encoding="utf-8")


def may_change(key: str, before: JSON = None, *, program_names: str | None = None) -> bool:
    """Returns whether a resumed run may change the setting with this dotted key.

    before: its value at the start of the run. program_names: beginning of the names of a program's functions, which
    have new names in each process.
    """
    if program_names and re.match(r"(task\.mixture\.\d+\.)?reward\.(name$|parts)", key):
        return str(before or "").startswith(program_names)
    return _is_of(key, CHANGEABLE)


def check_changed_settings(
    checkpoint: Path, settings: Mapping[str, JSON], *, program_names: str | None = None
) -> list[str]:
    """Compares the settings of a resumed run with the settings in its checkpoint.

    settings: masked. program_names: as of may_change(). Returns a sentence for each changed setting. Raises UserError
    that lists all changes, each with the word allowed or not allowed, if one of them would make the resumed run another
    run.
    """
    remedy = f"Delete {checkpoint} to resume from the one before."
    stored = read_mapping(checkpoint / SETTINGS_FILE, remedy=remedy)
    written = flatten_settings(follow_moved_files(stored, _runs_of(checkpoint)))
    present = flatten_settings(dict(settings))
    planned = written.get("schedule.preset") == present.get("schedule.preset") == "auto"
    lines, refused = [], False
    for key in sorted(written.keys() | present.keys()):
        before, after = written.get(key), present.get(key)
        if before == after:
            continue
        is_allowed = (planned and _is_of(key, ("schedule",))) or may_change(key, before, program_names=program_names)
        refused |= not is_allowed
        verdict = "allowed" if is_allowed else "not allowed: it would make the resumed run another run"
        lines.append(f"{key}: {format_value(before)} -> {format_value(after)} ({verdict})")
    if refused:
        listed = "\n  ".join(lines)
        raise UserError(
            f"the settings differ from those of {checkpoint}:\n  {listed}\n"
            "Restore config.yaml, or start a new run with the new settings."
        )
    return lines


def _runs_of(checkpoint: Path) -> Path:
    """Returns the folder of the runs: a checkpoint is RUNS/NAME/checkpoints/step_N."""
    return checkpoint.resolve().parent.parent.parent


def _is_of(key: str, sections: tuple[str, ...]) -> bool:
    return f"{key}.".startswith(tuple(f"{name}." for name in sections))


def format_value(value: JSON) -> str:
    """Returns the value of a setting for an error, shortened."""
    return "unset" if value is None else json.dumps(value)[:200]


DATA_FOLDER = "data"
"""Folder, in the folder of the runs, for a program's rows and models, so that a run can be resumed after its program
ended."""
_FILE = re.compile(rf"/.*/{DATA_FOLDER}/([0-9a-f]{{16}}/[\w.-]+\.jsonl|model-[0-9a-f]{{16}})")
"""Path of such a file. A part of it is a hash of the content."""


def follow_moved_files(settings: Mapping[str, JSON], runs: Path) -> dict[str, JSON]:
    """Returns the settings of a run with the paths of its program's files in the folder of the runs.

    A file that is not in the folder keeps its path. runs: folder of the runs.
    """
    return {name: _follow(value, runs) for name, value in settings.items()}


def follow_moved_file(path: str, runs: Path) -> str:
    """Returns the path of a program's file in the folder of the runs; another path as it is."""
    found = _FILE.fullmatch(path)
    here = runs.resolve() / DATA_FOLDER / found[1] if found else None
    return str(here) if here and here.exists() else path


def _follow(value: JSON, runs: Path) -> JSON:
    if isinstance(value, Mapping):
        return follow_moved_files(value, runs)
    if isinstance(value, list):
        return [_follow(inner, runs) for inner in value]
    return follow_moved_file(value, runs) if isinstance(value, str) else value
