"""Named schedules: one YAML file each, shipped or the user's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from interlace.core.errors import UserError, nearest
from interlace.core.yaml_text import parse_yaml
from interlace.schedule.schedule import Schedule

FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """The shipped presets, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def preset_path(name: str) -> Path:
    """The file of a shipped preset, or of a user's own, given as a path that ends in .yaml. Raises UserError."""
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise UserError(f"schedule {name!r}: there is no such file (looked in {Path(name).parent.resolve()}).")
        return Path(name)
    if name not in preset_names():
        raise UserError(
            f"unknown schedule {name!r}.{nearest(name, preset_names())} Your own is written as a path to a YAML file."
        )
    return FOLDER / f"{name}.yaml"


def load_schedule(name: str, changes: Mapping[str, object] | None = None) -> Schedule:
    """A preset with some fields changed; nested mappings of one kind are merged. Raises UserError naming the key."""
    path = preset_path(name)
    try:
        data = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"schedule {name!r} ({path}) is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"schedule {name!r} ({path}) holds a {type(data).__name__}, not fields of a schedule.")
    where = f"schedule {name}"
    # Spelled out before merging: a change to one part of `granularity: sample` must leave the other parts at `sample`.
    preset = Schedule.parse(data, where=where).model_dump()
    return Schedule.parse(_merged(preset, changes or {}), where=where)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = value
        # Settings of one kind of tail are nothing to another, which has its own defaults.
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("kind") in (None, old.get("kind")):
            result[key] = _merged(old, value)
    return result
