"""Candidates of the planner: placements as shares of the devices, and the other fields of a schedule."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from interlace.core.errors import UserError
from interlace.schedule.placement import HOST, Device, Pools
from interlace.schedule.schedule import Schedule

WHOLE = Fraction(1)
SHARES = tuple(Fraction(eighths, 8) for eighths in range(1, 8))
"""Shares of the devices that are tried for a role."""
HYBRIDS = ((WHOLE, Fraction(1, 2)), (WHOLE, Fraction(1, 4)), (Fraction(3, 4), Fraction(1, 2)))
"""(share that generates, share that trains) of layouts in which some devices do both."""
_MEASURE = tuple(Device(index=n, pool="any", pool_index=n, memory_bytes=0) for n in range(840))
"""Devices for measuring a schedule's shares; 840 is divisible by all numbers up to 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Placement of the roles."""

    rollout: Fraction = WHOLE
    """Share of the devices that generates, from the first device on."""
    training: Fraction = WHOLE
    """Share of the devices that trains, up to the last device. Some devices do both if the two shares exceed 1."""
    inference: Literal["training", "rollout", "apart"] = "training"
    """Devices of the reference: those that train, those that generate, or the first quarter of those that train, which
    then trains on the remaining three quarters."""
    span: int = 1
    """Devices per instance of the rollout engine."""
    env: Fraction | Literal["host", "rollout"] = "host"
    """Devices of the simulators: the share after the generating devices, the generating devices, or the host."""
    turned: bool = False
    """True if the last devices generate and the first train. In a mixed cluster this swaps the kinds."""

    def placement(self, num_devices: int, pools: Pools = ()) -> Mapping[str, object] | None:
        """Returns the placement on `num_devices`; None if a part would be empty or cannot be divided.

        pools: kinds of a mixed cluster; an engine never spans several kinds.
        """
        generating = _count_devices(self.rollout, num_devices, self.span)
        simulating = _count_devices(self.env, num_devices, 1) if isinstance(self.env, Fraction) else 0
        rest = num_devices - generating - simulating
        training = rest if self.is_split else _count_devices(self.training, num_devices, 1)
        apart = training // 4 if self.inference == "apart" else 0
        if (
            not generating
            or generating > num_devices
            or training - apart < 1
            or rest < 0
            or (isinstance(self.env, Fraction) and not simulating)
            or (self.inference == "apart" and not apart)
        ):
            return None
        first = num_devices - training
        generate, train, infer = (0, generating), (first + apart, num_devices), (first, first + apart)
        move = (generating, generating + simulating) if simulating else generate
        if self.turned:
            generate, train, infer, move = (
                (num_devices - end, num_devices - start) for start, end in (generate, train, infer, move)
            )
        if any(count % self.span for _, _, count in _list_parts(generate, pools)):
            return None
        inferring = {"training": train, "rollout": generate, "apart": infer}[self.inference]
        return {
            "rollout": {
                "devices": _name_devices(generate, pools),
                "devices_per_instance": self.span if self.span > 1 else None,
            },
            "env": HOST if self.env == "host" else _name_devices(move, pools),
            "reference": _name_devices(inferring, pools),
            "critic": _name_devices(train, pools),
            "actor": _name_devices(train, pools),
        }

    @property
    def is_split(self) -> bool:
        """True if no device both generates and trains, and no device is idle."""
        return self.rollout + self.training + (self.env if isinstance(self.env, Fraction) else 0) == 1

    @property
    def lends(self) -> bool:
        """True if some devices generate and train, and others only generate."""
        return self.training < 1 and self.rollout + self.training > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Schedule for any number of devices."""

    layout: Layout
    rest: Schedule
    """All fields except the placement."""
    name: str = ""
    """Preset from which the candidate comes."""

    def on(self, num_devices: int, pools: Pools = ()) -> Schedule | None:
        """Returns the schedule for a cluster; None if the cluster is too small or cannot be divided."""
        placement = self.layout.placement(num_devices, pools)
        if placement is None:
            return None
        return Schedule.parse({**self.rest.model_dump(), "placement": placement})

    def changed(self, fields: Mapping[str, object]) -> "Candidate | None":
        """Returns the candidate with other fields; None if the fields contradict each other."""
        rest = change_fields(self.rest, fields)
        return replace(self, rest=rest) if rest else None

    def vary(self, decisions: Iterable[Mapping[str, object]]) -> Iterator["Candidate"]:
        """Yields the candidate with the fields of each decision, if they change it and do not contradict each other."""
        yield from (each for fields in decisions if (each := self.changed(fields)) and each != self)

    @classmethod
    def of(cls, schedule: Schedule, name: str = "", devices: tuple[Device, ...] = ()) -> "Candidate":
        """Builds a candidate from a schedule, with its placement as shares. devices: those that it names by number."""
        devices = devices or _MEASURE
        counted = {role: _find_indices(schedule, role, devices) for role in ("rollout", "reference", "actor")}
        inference: Literal["training", "rollout", "apart"] = "training"
        if counted["reference"] == counted["rollout"] != counted["actor"]:
            inference = "rollout"
        elif not counted["reference"] & (counted["rollout"] | counted["actor"]):
            inference = "apart"
        env: Fraction | Literal["host", "rollout"] = "host"
        if schedule.placement.of("env").devices != HOST:
            simulating = _find_indices(schedule, "env", devices)
            env = "rollout" if simulating == counted["rollout"] else Fraction(len(simulating), len(devices))
        span = schedule.placement.of("rollout").devices_per_instance
        layout = Layout(
            rollout=Fraction(len(counted["rollout"]), len(devices)),
            training=Fraction(
                len(counted["actor"] | (counted["reference"] if inference == "apart" else set())), len(devices)
            ),
            inference=inference,
            env=env,
            span=span if isinstance(span, int) else 1,
        )
        return cls(layout=layout, rest=schedule.model_copy(update={"placement": Schedule().placement}), name=name)


def _find_indices(schedule: Schedule, role: str, devices: tuple[Device, ...]) -> frozenset[int]:
    return frozenset(device.index for instance in schedule.instances(role, devices) for device in instance)


def change_fields(schedule: Schedule, fields: Mapping[str, object]) -> Schedule | None:
    """Returns the schedule with other fields; None if the fields contradict each other."""
    try:
        return Schedule.parse({**schedule.model_dump(), **fields})
    except UserError:
        return None


def _count_devices(share: Fraction, num_devices: int, span: int) -> int:
    """Returns the multiple of `span` nearest to a share of the devices."""
    return min(math.floor(share * num_devices / span + Fraction(1, 2)), num_devices // span) * span


def _format_range(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}-{end - 1}"


def _list_parts(devices: tuple[int, int], pools: Pools) -> Iterator[tuple[str, int, int]]:
    """Yields (kind, first device within the kind, number) for each kind in a range of the cluster's devices."""
    start = 0
    for pool, count in pools:
        low, high = max(devices[0] - start, 0), min(devices[1] - start, count)
        if low < high:
            yield pool, low, high - low
        start += count


def _name_devices(devices: tuple[int, int], pools: Pools) -> str:
    if not pools:
        return _format_range(*devices)
    return ",".join(
        f"{pool}:{_format_range(first, first + count)}" for pool, first, count in _list_parts(devices, pools)
    )


def selects_by_speed(schedule: Schedule) -> bool:
    """Returns whether completion time affects the selection of training samples, which may bias lengths.

    If groups can overtake others, fast groups are trained on earlier although none is dropped, because the last batch
    and the end of a run cut off the slow ones.
    """
    overtakes = not schedule.batches_are_fixed and schedule.overtake != 0
    return leaves_out(schedule) or overtakes


def leaves_out(schedule: Schedule) -> bool:
    """Returns whether slow groups are left out of training, permanently or until a retry."""
    return schedule.tail.kind in ("oversample", "tail_batching") or schedule.on_straggler != "hold"


def warm_up_steps(schedule: Schedule) -> int:
    """Returns the steps until an initially empty pipeline is in steady state."""
    ahead = schedule.steps_ahead
    return math.ceil(1.5 * ahead) + 1 if ahead else 0


def period_steps(schedule: Schedule) -> int:
    """Returns the period of the schedule in steps: a version, or the short rounds and their long round."""
    surplus = getattr(schedule.tail, "prompts", 1.0) - 1 if schedule.tail.kind == "tail_batching" else 0
    return max(schedule.sync_every, math.ceil(1 / surplus - 1e-9) + 1 if surplus > 0 else 1)


_AHEAD = (
    (1, None, 1),
    (1, 0.5, 1),
    (2, None, 1),
    (2, 1, 1),
    (4, None, 1),
    (4, 2, 1),
    (8, 4, 1),
    (1, None, 2),
    (0.5, None, 4),
)
"""(max_staleness, pipeline_depth, sync_every)."""
_SURPLUSES = ((1.25, 1.0), (1.25, 1.25), (1.25, 1.5), (1.5, 1.0), (1.5, 1.25), (1.5, 1.5), (2.0, 1.25), (2.0, 1.5))
"""(prompts, responses) launched per one needed."""
_TAILS: tuple[object, ...] = (
    "none", {"kind": "migrate"}, {"kind": "migrate", "remaining_share": 0.5, "batch": "100%", "kv_share": 0.5},
    *({"kind": kind, "prompts": prompts, "responses": responses}
      for kind in ("oversample", "tail_batching")
      for prompts, responses in _SURPLUSES),
)  # fmt: skip
_LOANS = (None, 0.3, 0.6, 0.8, 0.9)
"""Shares of a batch that end a loan of devices."""


def neighbours(
    candidate: Candidate,
    *,
    spans: Iterable[int],
    has_reference: bool,
    has_env: bool = False,
    has_tools: bool = False,
    pools: Pools = (),
) -> list[list[Candidate]]:
    """Returns the candidates that differ in one decision, a list for each decision.

    has_tools: whether samples wait between turns. All candidates have the same decisions, in the same order.
    """
    layout = candidate.layout
    return [
        *([*found] for found in _list_moves(candidate, tuple(spans), has_reference)),
        *([*candidate.vary(fields)] for fields in _list_decisions(candidate.rest, has_reference)),
        [*candidate.vary([{"concurrency": "episodes"}])] if has_tools else [],
        [*candidate.vary({"lend_until": share} for share in _LOANS)] if layout.lends else [],
        [*_with_simulators(candidate)] if has_env else [],
        [*by_kind(candidate, pools)],
    ]


def _list_moves(candidate: Candidate, spans: tuple[int, ...], has_reference: bool) -> Iterator[Iterator[Candidate]]:
    """Yields the candidates with other shares, other engine sizes, and another place of the reference."""
    here = candidate.layout
    places = [(WHOLE, WHOLE), *((share, 1 - share) for share in SHARES), *HYBRIDS]
    shares = [replace(here, rollout=rollout, training=training) for rollout, training in places]
    if here.is_split:  # smaller changes than between SHARES
        shares += [
            replace(here, rollout=here.rollout + by, training=here.training - by)
            for by in (Fraction(1, 16), Fraction(-1, 16))
            if 0 < here.rollout + by < 1
        ]
    inferences: tuple[Literal["training", "rollout", "apart"], ...] = ("training", "rollout", "apart")
    sizes = [replace(here, span=span) for span in spans]
    for layouts in (shares, sizes, [replace(here, inference=place) for place in inferences] if has_reference else []):
        yield (replace(candidate, layout=layout) for layout in layouts if layout != here)


def _with_simulators(candidate: Candidate) -> Iterator[Candidate]:
    """Yields the candidate with other placements of the simulators and other numbers of environments per move."""
    here, quarter, half = candidate.layout, Fraction(1, 4), Fraction(1, 2)
    places: list[tuple[Fraction, Fraction | Literal["host", "rollout"], Fraction]] = [
        (WHOLE, "rollout", WHOLE),
        *((share, 1 - share, WHOLE) for share in SHARES),
        (quarter, quarter, half),
        (half, quarter, quarter),
        (quarter, half, quarter),
        (half, "rollout", half),
        (here.rollout, "host", here.training),
    ]
    for rollout, env, training in places:
        layout = replace(here, rollout=rollout, env=env, training=training)
        if layout != here:
            yield replace(candidate, layout=layout)
    granularity = candidate.rest.granularity.model_dump()
    yield from candidate.vary(
        {"granularity": {**granularity, "env": granule}} for granule in ("sample", "25%", "50%", "100%")
    )


def by_kind(candidate: Candidate, pools: Pools) -> Iterator[Candidate]:
    """Yields the candidate with one kind of devices generating and the others training; none if all are of one kind."""
    total = sum(count for _, count in pools)
    for first in range(1, len(pools)):
        share = Fraction(sum(count for _, count in pools[:first]), total)
        for turned, rollout in ((False, share), (True, 1 - share)):
            layout = replace(candidate.layout, rollout=rollout, training=1 - rollout, turned=turned)
            if layout != candidate.layout:
                yield replace(candidate, layout=layout)


def _list_decisions(rest: Schedule, has_reference: bool) -> Iterator[list[Mapping[str, object]]]:
    """Yields the alternatives of each decision except the placement, as fields."""
    waits = {
        "max_staleness": 0, "pipeline_depth": None, "sync_every": 1, "batching": "step", "on_straggler": "hold",
        "overtake": None,
    }  # fmt: skip
    ahead = [
        {"max_staleness": bound, "pipeline_depth": depth, "sync_every": every, "batching": "arrival", "tail": "none"}
        for bound, depth, every in _AHEAD
    ]
    yield [waits, *ahead]
    yield [
        {"on_update": mode} if mode != "keep" else {"on_update": mode, "kv_on_switch": "offload"}
        for mode in ("drain", "abort_resume", "keep", "recompute")
    ]
    yield [{"switch": when} for when in ("when_idle", "when_ready")]
    yield [
        {**waits, "tail": tail} if isinstance(tail, Mapping) and tail["kind"] != "migrate" else {"tail": tail}
        for tail in _TAILS
    ]
    granularity = rest.granularity.model_dump()
    stages = ("reward", "reference", "critic", "actor") if has_reference else ("actor",)
    fine = {stage: "12%" if stage == "actor" else "sample" for stage in granularity if stage != "env"}
    grains = [{stage: granule} for granule in ("step", "group", "12%") for stage in stages]
    yield [{"granularity": {**granularity, **grain}} for grain in (fine, *grains)]
    yield [{"dispatch": policy} for policy in ("round_robin", "least_tokens", "longest_first", "skew_aware")]
    yield [{"publish": how} for how in ("blocking", "background")]
    yield [{"weight_update": how} for how in ("all_at_once", "rolling")]
    yield [{"concurrency": limit} for limit in (None, "adaptive", 32, 64, 128)]


@lru_cache(maxsize=1)
def plain() -> tuple[Candidate, ...]:
    """Returns the initial candidates besides the presets: synchronous and asynchronous, shared and split devices."""
    ahead = {
        "max_staleness": 4, "pipeline_depth": 2, "batching": "arrival", "on_update": "keep", "dispatch": "least_tokens",
    }  # fmt: skip
    shared, split = Layout(), Layout(rollout=Fraction(3, 4), training=Fraction(1, 4))
    found = [Candidate(layout=layout, rest=Schedule.parse({"dispatch": "least_tokens"})) for layout in (shared, split)]
    found += [Candidate(layout=split, rest=Schedule.parse(ahead))]
    return (*found, Candidate(layout=shared, rest=Schedule.parse({**ahead, "switch": "when_ready"})))
