"""Schedule that the planner has yet to choose. Only the bounds of the choice are given."""

from collections.abc import Mapping

from interlace.core.errors import UserError
from interlace.schedule.schedule import Schedule

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
