"""Schedules that must train alike: without staleness, the place and time of a computation change no sample."""

from collections.abc import Mapping

from interlace.core.errors import UserError
from interlace.schedule.placement import ROLES, list_staged_roles
from interlace.schedule.schedule import NoTail, Oversample, Schedule, TailBatching

_SPLIT = {role.name: "0-50%" if role.name == "rollout" else "50-100%" for role in ROLES if role.is_common}
_PLAIN: Mapping[str, object] = {
    "placement": "all",
    "granularity": {role.name: role.granule for role in list_staged_roles()},
    "dispatch": "round_robin",
    "tail": NoTail().model_dump(),
    "switch": "when_idle",
    "kv_on_switch": "offload",
    "min_hold": 0.0,
    "lend_until": None,
    "on_update": "drain",
    "rollout_budget": None,
    "concurrency": None,
}
"""Settings that the variants start from. They keep the schedule's sync_every, batching and publication."""
_STREAM: Mapping[str, object] = {role.name: "sample" for role in list_staged_roles()}
_VARIANTS: Mapping[str, Mapping[str, object]] = {
    "colocated": {},
    "disaggregated": {"placement": _SPLIT},
    "hybrid": {
        "placement": {**_SPLIT, "rollout": "all"},
        "granularity": "group",
        "tail": {"kind": "migrate", "remaining_share": 0.5, "batch": 64},
    },
    "streaming": {"placement": _SPLIT, "granularity": _STREAM},
    "dispatch": {"dispatch": "longest_first", "concurrency": 3},
    "switch": {
        "switch": "when_ready",
        "kv_on_switch": "recompute",
        "granularity": {**_STREAM, "actor": "step"},
        "concurrency": {"kind": "adaptive", "initial": 2},
    },
    "partial": {"rollout_budget": 3, "on_update": "abort_resume"},
}


def equivalents(schedule: Schedule) -> dict[str, Schedule]:
    """Returns a schedule and its variants by name. All give the same samples and, up to rounding, the same weights.

    The variants need two devices. Raises UserError for a schedule whose result depends on timing.
    """
    refuse_races(schedule)
    own = schedule.model_dump()
    variants = {name: Schedule.parse({**own, **_PLAIN, **changes}) for name, changes in _VARIANTS.items()}
    return {"as given": schedule, **variants}


def refuse_races(schedule: Schedule) -> None:
    """Raises UserError if the training data depends on timing."""
    if schedule.max_staleness > 0:
        raise UserError(
            f"max_staleness = {schedule.max_staleness:g}: the weights that generate a token depend on timing, "
            "so no two runs need agree. Use a synchronous schedule, such as schedule=verl-colocated."
        )
    if isinstance(schedule.tail, Oversample | TailBatching):
        raise UserError(
            f"tail {schedule.tail.kind!r} trains on the first samples to finish, which depends on timing. "
            "Set schedule.tail=none."
        )
    if schedule.on_straggler != "hold":
        raise UserError(
            f"on_straggler {schedule.on_straggler!r} drops or restarts late groups, which depends on timing. "
            "Set schedule.on_straggler=hold."
        )
    if schedule.batching == "arrival" and schedule.sync_every > 1:
        raise UserError(
            f"batching 'arrival' with sync_every {schedule.sync_every} assigns the groups of a version to its steps "
            "as they finish, which depends on timing. Set schedule.batching=step or schedule.sync_every=1."
        )
