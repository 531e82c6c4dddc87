"""Named schedules: one YAML file each, shipped or user-defined; and `auto`, whose fields the planner chooses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace.core.errors import UserError
from interlace.core.yaml_text import YamlFiles
from interlace.schedule.schedule import Schedule

FOLDER = Path(__file__).parent / "presets"
_PRESETS = YamlFiles(kind="schedule", folder=FOLDER)
preset_names, preset_path = _PRESETS.names, _PRESETS.path
BOUNDS = ("max_staleness",)


def bounding(given: Mapping[str, object]) -> Schedule:
    """Returns a schedule that contains only the bounds of a later choice. Raises UserError for any other field."""
    if other := sorted(set(given) - set(BOUNDS)):
        raise UserError(
            f"schedule auto chooses every field; {', '.join(other)} cannot be given beside it. {', '.join(BOUNDS)} "
            "bounds what it may choose; for the rest name a preset, or a file of `interlace plan`."
        )
    return Schedule.parse(given, where="schedule auto")


def bounds_of(schedule: Schedule) -> dict[str, object]:
    """Returns the bounds that a schedule of bounding() contains."""
    return {name: getattr(schedule, name) for name in BOUNDS}


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
