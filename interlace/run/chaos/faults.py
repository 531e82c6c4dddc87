"""Specification of faults: `kill:rollout@0.1/step,stop:reward@30s`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from interlace.core.errors import UserError, nearest
from interlace.core.random import keyed_random
from interlace.engines.rollout.kinds import create_kind
from interlace.robots.env_stage import simulators_of
from interlace.run.chaos.phases import PHASES, Phase
from interlace.run.clusters.base import back_end
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.run.recipe.layout import find_needed_roles, num_ranks
from interlace.schedule.placement import ROLES

KINDS = ("kill", "stop")
TRAINED = ("actor", "critic")
"""Roles after whose faults the run starts again from its newest checkpoint."""
EPISODE = "episode"
"""Role of the processes that run episodes, which is no role of a schedule."""
EXAMPLE = "Write KIND:ROLE@RATE with commas between, as in kill:rollout@0.1/step,kill:actor@1/update,stop:reward@30s."
STEP = "step"
_FAULT = re.compile(r"(?P<kind>[^:@]*):(?P<role>[^:@]*)@(?P<rate>[^:@]*)")
_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(/(?P<unit>\w+)|s)")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSpec:
    """Faults of one kind in the processes of one role."""

    text: str
    """The specification as the user wrote it."""
    kind: Literal["kill", "stop"]
    """kill: SIGKILL. stop: SIGSTOP."""
    role: str
    per_step: float = 0.0
    """Probability of one fault in a step; 0 for a fault at a time."""
    at_s: float | None = None
    """Seconds from the start of the run to the only fault; None for faults by step."""
    phase: Phase | None = None
    """Phase of the run in which the fault comes; None for any time."""

    def delay_in(self, step: int, seed: int) -> float | None:
        """Returns the place of the fault in a step, as a share of its duration; None if the step has none."""
        draw = keyed_random("chaos", seed, self.text, step)
        return draw.random() if draw.random() < self.per_step else None


def parse_faults(text: str) -> tuple[FaultSpec, ...]:
    """Reads a specification. Raises UserError for an unknown kind, role or rate."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError(f"--faults {text!r} has no fault. {EXAMPLE}")
    found = [_parse_fault(part) for part in parts]
    if twice := next((each.text for each in found if [other.text for other in found].count(each.text) > 1), None):
        raise UserError(f"--faults names {twice!r} twice: raise its rate instead.")
    return tuple(found)


def _parse_fault(part: str) -> FaultSpec:
    match = _FAULT.fullmatch(part)
    if match is None:
        raise UserError(f"--faults: {part!r} is not a fault. {EXAMPLE}")
    kind, role, rate = match["kind"], match["role"], match["rate"]
    if kind not in KINDS:
        raise UserError(f"--faults: {part!r} has the unknown kind {kind!r}.{nearest(kind, KINDS)}")
    if role not in faulty_roles():
        other = next((each for each in ROLES if each.name == role), None)
        if other is not None:
            raise UserError(
                f"--faults: {part!r}: {role!r} has no process on this machine that a fault can strike. Roles with "
                f"processes: {', '.join(faulty_roles())}."
            )
        raise UserError(f"--faults: {part!r} has the unknown role {role!r}.{nearest(role, faulty_roles())}")
    number = _RATE.fullmatch(rate)
    if number is None:
        raise UserError(
            f"--faults: {part!r} has the rate {rate!r}. Write a probability as 0.1/step, a probability in a phase of "
            "each step as 0.1/update, or a time as 30s."
        )
    value, unit = float(number["number"]), number["unit"]
    if unit is None:
        return FaultSpec(text=part, kind=kind, role=role, at_s=value)  # type: ignore[arg-type]  # checked above
    if not 0 < value <= 1:
        raise UserError(f"--faults: {part!r} has the rate {rate!r}; a probability is above 0 and at most 1.")
    if unit not in (STEP, *PHASES):
        raise UserError(
            f"--faults: {part!r} has the unknown phase {unit!r}.{nearest(unit, (STEP, *PHASES))} /step is "
            "any time of a step."
        )
    phase = None if unit == STEP else unit
    return FaultSpec(text=part, kind=kind, role=role, per_step=value, phase=phase)  # type: ignore[arg-type]


def faulty_roles() -> Sequence[str]:
    """Returns the roles whose processes are started again within the same command, if they have processes."""
    respawned = [role.name for role in ROLES if role.recovery == "respawn"]
    return [*respawned, EPISODE, *TRAINED]


def check_processes(recipe: Recipe, faults: Sequence[FaultSpec]) -> None:
    """Raises UserError for a fault in a role that has no process in this recipe."""
    if recipe.cluster.address or not (recipe.cluster.is_ray or recipe.cluster.backend == "local"):
        raise UserError(
            f"cluster.backend={recipe.cluster.backend}, cluster.address={recipe.cluster.address}: faults are injected "
            "into processes that the command starts on this machine. Set cluster.backend=local, or ray without an "
            "address, or give --devices for a run on the virtual clock."
        )
    for fault in faults:
        if reason := _find_absence(recipe, fault.role):
            raise UserError(f"--faults {fault.text}: {reason}")


def _find_absence(recipe: Recipe, role: str) -> str:
    """Returns why a role has no process that can be killed; empty if it has one."""
    if role == EPISODE and (recipe.episode.is_single_turn or not recipe.episode.workers):
        return "the recipe's episodes have no process. Set an episode other than single_turn and episode.workers=1."
    if role == "env" and simulators_of(recipe.episode) is None:
        return "the recipe has no environments."
    if role in (*TRAINED, "reference") and role not in {
        each.name for each in find_needed_roles(algorithm_of(recipe).needs)
    }:
        return f"the recipe's algorithm has no {role}."
    if role == "reward" and recipe.reward is None:
        return "the recipe has no reward."
    return "" if recipe.cluster.is_ray else _find_absence_here(recipe, role)


def _find_absence_here(recipe: Recipe, role: str) -> str:
    """Returns why a role has only threads of the command, or processes that the run does not start."""
    if role == "rollout" and (not create_kind(recipe.rollout).is_service or recipe.rollout.engine == "address"):
        return f"rollout.engine={recipe.rollout.engine} has no process that the run starts. Set rollout=interlace."
    if role == "reward" and (recipe.reward is None or recipe.reward.model is not None or not recipe.reward.workers):
        return "the recipe's reward has no process. Set reward.workers=1."
    if role in TRAINED:
        return _absence_of_ranks(recipe, role)
    return "the reference is a thread of the command. Set cluster.backend=ray." if role == "reference" else ""


def _absence_of_ranks(recipe: Recipe, role: str) -> str:
    devices = back_end(recipe.cluster).find_devices(recipe.cluster)
    [places, *_] = recipe.schedule.resolved.placement.instances(role, devices)
    if num_ranks(recipe, role, places) == 1:
        return f"the {role} has one rank, which is a thread of the command. Set {role}.ranks=2."
    return ""
