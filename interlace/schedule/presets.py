"""Named schedules: one YAML file each, shipped or user-defined."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace.core.yaml_text import YamlFiles
from interlace.schedule.schedule import Schedule

FOLDER = Path(__file__).parent / "presets"
_PRESETS = YamlFiles(kind="schedule", folder=FOLDER)
preset_names, preset_path = _PRESETS.names, _PRESETS.path


def load_schedule(name: str, changes: Mapping[str, object] | None = None) -> Schedule:
    """Returns a preset with some fields changed. Nested mappings of one kind are merged. Errors name the key."""
    data = _PRESETS.read(name, may_be_empty=True)
    where = f"schedule {name}"
    # Expanded before merging: a change to one part of `granularity: sample` must keep the other parts at `sample`.
    preset = Schedule.parse(data, where=where).model_dump()
    return Schedule.parse(_merge_changes(preset, changes or {}), where=where)


def _merge_changes(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = value
        # The settings of one kind of tail do not apply to another kind, which has its own defaults.
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("kind") in (None, old.get("kind")):
            result[key] = _merge_changes(old, value)
    return result
