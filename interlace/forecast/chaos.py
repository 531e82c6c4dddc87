"""A recipe on the virtual clock under faults, next to the same run without them."""

import math
from collections.abc import Sequence
from dataclasses import replace

from interlace.core.errors import InterlaceError, UserError
from interlace.core.random import keyed_random
from interlace.core.types import TerminalEvent
from interlace.forecast.simulate import Simulation, simulate
from interlace.forecast.virtual import Simulated
from interlace.run.chaos.certificate import Certificate, EndedKey, FaultRecord, SampleCounts
from interlace.run.chaos.faults import EPISODE, TRAINED, FaultSpec
from interlace.run.recipe.config import Recipe
from interlace.runtime.sim.cluster import DETECTION_S, ProcessFault, ProcessFaults


def simulate_faults(
    recipe: Recipe, faults: Sequence[FaultSpec], simulation: Simulation, *, restart_s: float
) -> Certificate:
    """Simulates a recipe without faults, then with them. restart_s: seconds for the start of a process.

    A fault of a trainer adds its cost to the simulated time: the start, and the repeated steps since the newest
    checkpoint. Raises UserError for a role that is not simulated.
    """
    _refuse_unsimulated(faults)
    calm = simulate(recipe, simulation)
    times = _time_faults(faults, calm, recipe.seed)
    injected = ProcessFaults([each for each in times if each.role not in TRAINED], restart_s)
    # The virtual cluster injects no fault after the end of the run; the times of the trainers' faults are not on it.
    restarts = [each for each in times if each.role in TRAINED and each.at_s < calm.seconds]
    schedule = recipe.schedule.resolved
    try:
        rough: Simulated | None = simulate(recipe, replace(simulation, process_faults=injected))
        error = ""
    except InterlaceError as failure:
        rough, error = None, str(failure)
    recovered = sorted(injected.recovered_s.items(), key=lambda item: item[0].at_s)
    ended = [(fault, injected.target(fault), seconds) for fault, seconds in recovered]
    ended += [(fault, fault.role, DETECTION_S[fault.kind] + restart_s) for fault in restarts]
    found = [
        FaultRecord(fault=fault.name, role=fault.role, target=target, at_s=fault.at_s, recovered_s=seconds)
        for fault, target, seconds in ended
    ]
    again_s = math.fsum(_measure_repeated_s(fault, calm, recipe) for fault in restarts)
    lost_s = again_s + math.fsum(DETECTION_S[fault.kind] + restart_s for fault in restarts)
    counts = SampleCounts.of(_list_ended(rough), recipe.samples_per_prompt)
    return Certificate(
        faults=found,
        is_complete=rough is not None,
        error=error,
        events=counts.events,
        lost=counts.lost,
        duplicated=counts.duplicated,
        staleness_max=max((result.metrics["sched/staleness_max"] for result in rough.results), default=0.0)
        if rough
        else 0.0,
        staleness_bound=math.ceil(schedule.max_staleness),
        step_s=_step_s(rough) + lost_s,
        step_s_without_faults=_step_s(calm),
        samples_equal=_list_trained(rough) == _list_trained(calm) if rough and schedule.max_staleness == 0 else None,
        weights_equal=None,  # simulated workers have no weights
    )


def _refuse_unsimulated(faults: Sequence[FaultSpec]) -> None:
    if fault := next((each for each in faults if each.phase), None):
        raise UserError(
            f"--faults {fault.text}: faults of a phase are not simulated on the virtual clock. Write "
            f"{fault.per_step:g}/step, or leave --devices out."
        )
    if fault := next((each for each in faults if each.role == EPISODE), None):
        raise UserError(
            f"--faults {fault.text}: faults of {EPISODE!r} are not simulated on the virtual clock; leave --devices out."
        )


def _time_faults(faults: Sequence[FaultSpec], calm: Simulated, seed: int) -> list[ProcessFault]:
    """Returns the faults at their times. The steps of the run without faults determine when a step begins."""
    found = []

    def add(fault: FaultSpec, at_s: float, number: int) -> None:
        instance = keyed_random("chaos target", seed, fault.text, number).randrange(1 << 16)
        found.append(ProcessFault(name=fault.text, role=fault.role, kind=fault.kind, at_s=at_s, instance=instance))

    for fault in faults:
        if fault.at_s is not None:
            add(fault, fault.at_s, 0)
        begin_s = calm.seconds - _step_s(calm)
        for result in calm.results:
            place, step_s = fault.delay_in(result.step, seed), result.metrics["timing_s/step"]
            if place is not None:
                add(fault, begin_s + place * step_s, result.step)
            begin_s += step_s
    return found


def _measure_repeated_s(fault: ProcessFault, calm: Simulated, recipe: Recipe) -> float:
    """Returns the seconds from the newest checkpoint to a fault, whose steps are repeated."""
    intervals = [every for every in (recipe.checkpoint_every, recipe.recovery.memory_checkpoint_every) if every]
    saved_s = end_s = calm.seconds - _step_s(calm)
    for result in calm.results:
        end_s += result.metrics["timing_s/step"]
        if end_s > fault.at_s:
            break
        if any(result.step % every == 0 for every in intervals):
            saved_s = end_s
    return max(0.0, fault.at_s - saved_s)


def _step_s(run: Simulated | None) -> float:
    return math.fsum(result.metrics["timing_s/step"] for result in run.results) if run else 0.0


def _list_ended(run: Simulated | None) -> list[EndedKey]:
    return [EndedKey(*each.sample.key, each.event) for each in run.events] if run else []


def _list_trained(run: Simulated) -> list[tuple[int, str, int, int]]:
    return sorted(
        (result.step, each.sample.uid, each.sample.key.index, each.sample.num_tokens)
        for result in run.results
        for each in result.ended
        if each.event == TerminalEvent.TRAINED
    )
