"""Predictions for the planner: a schedule simulated on the recipe's cluster, or on a model of it."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from interlace.core.errors import HangError, UserError
from interlace.core.types import TerminalEvent
from interlace.flows.run import StepResult
from interlace.jobs.simulate import Simulation
from interlace.jobs.virtual import Simulated, no_search_for_cycles, run_virtually
from interlace.observe.goodput import BINS, USEFUL, ledger_of
from interlace.recipes.config import Recipe, ScheduleChoice
from interlace.runtime.process.launch import spawn_context
from interlace.runtime.timeline import NoRecorder
from interlace.schedule.bounds import response_lengths
from interlace.schedule.candidates import leaves_out, selects_by_speed
from interlace.schedule.plans import Fidelity, Refused, Score, Scorer
from interlace.schedule.schedule import Schedule
from interlace.simulate.scale import scale_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Workplace:
    """Recipe and cluster that schedules are predicted for."""

    recipe: Recipe
    simulation: Simulation

    def score(self, schedule: Schedule, fidelity: Fidelity) -> Score | Refused:
        """Predicts a schedule; one that cannot run is refused with the reason."""
        counted = fidelity.counted_steps(schedule)
        steps, prompts = fidelity.num_steps(schedule), self.recipe.prompts_per_step // fidelity.scale
        recipe = self.recipe.model_copy(
            update={
                "schedule": ScheduleChoice(preset="a plan's", resolved=schedule),
                "prompts_per_step": prompts,
                "minibatches": self.recipe.minibatches if prompts % self.recipe.minibatches == 0 else 1,
                # The gate admits for steps that do not come: at a run's end nothing is generated ahead.
                "steps": 4 * steps + 16,
            }
        )
        simulation = self.simulation
        here = replace(
            simulation,
            profile=scale_model(simulation.profile, fidelity.scale, simulation.num_devices),
            num_devices=simulation.num_devices // fidelity.scale,
            pools=tuple((pool, count // fidelity.scale) for pool, count in simulation.pools),
        )
        with no_search_for_cycles():  # until most of the run is gone without a search
            try:
                run = run_virtually(
                    recipe, here, name="plan", recorder=NoRecorder, on_step=lambda result: result.step < steps
                )
            except (UserError, HangError) as error:
                return Refused(reason=str(error))
            score = score_of(run, counted, here, recipe)
            del run
        return score


def score_of(run: Simulated, counted: int, simulation: Simulation, recipe: Recipe) -> Score:
    """Returns the means over the last `counted` steps, of the whole cluster that the simulation stands for."""
    results = run.results[-counted:]
    rows = [result.metrics for result in results]
    step_s = [row["timing_s/step"] for row in rows]
    seconds = sum(step_s)
    per_device = sum(row["goodput/trained_tokens_per_device_s"] * row["timing_s/step"] for row in rows) / seconds
    ledger = ledger_of(rows)
    shift = 0.0
    if selects_by_speed(recipe.schedule.resolved):
        shift = _length_shift(results, simulation, recipe)
    return Score(
        step_s=seconds / counted,
        error_s=stdev(step_s) / math.sqrt(counted) if counted > 1 else 0.0,
        tokens_per_s=per_device * simulation.num_devices,
        goodput=sum(ledger.fraction(name) for name in USEFUL),
        staleness_mean=fmean(row["sched/staleness_mean"] for row in rows),
        staleness_max=max(row["sched/staleness_max"] for row in rows),
        length_shift=shift,
        bins={name: ledger.fraction(name) for name in BINS},
    )


def _length_shift(results: Sequence[StepResult], simulation: Simulation, recipe: Recipe) -> float:
    """Returns the mean length trained on against the profile's, less 1.

    Where all is trained on and only its order depends on speed, what two standard errors over groups explain is chance.
    """
    groups: dict[int, list[int]] = {}
    for ended in (ended for result in results for ended in result.ended if ended.event == TerminalEvent.TRAINED):
        groups.setdefault(ended.sample.key.gid, []).append(ended.sample.num_tokens)
    means = [fmean(lengths) for lengths in groups.values()]
    expected = fmean(response_lengths(simulation.profile.lengths, recipe.sampling.max_new_tokens))
    trained = fmean(length for lengths in groups.values() for length in lengths)
    chance = 2 * stdev(means) / math.sqrt(len(means)) / expected if len(means) > 1 else math.inf
    shift = trained / expected - 1
    return shift if leaves_out(recipe.schedule.resolved) or abs(shift) > chance else 0.0


_workplace: Workplace


def _begin(workplace: Workplace) -> None:
    global _workplace  # noqa: PLW0603 - all tasks of a pool's process share it
    _workplace = workplace


def _score(task: tuple[Schedule, Fidelity]) -> Score | Refused:
    return _workplace.score(*task)


@contextmanager
def open_scorer(workplace: Workplace, *, processes: int) -> Iterator[Scorer]:
    """Opens a scorer that simulates in processes of its own, or in this one where there is to be none."""
    if processes <= 1:
        yield lambda tasks: [_scaled(workplace.score(*task), task[1]) for task in tasks]
        return
    # Spawned, not forked: a run that plans has threads.
    context = spawn_context()
    with ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(workplace,)) as pool:

        def score(tasks: Sequence[tuple[Schedule, Fidelity]]) -> Sequence[Score | Refused]:
            # The longest first, so that none is left over at the end.
            order = sorted(range(len(tasks)), key=lambda place: -tasks[place][1].num_steps(tasks[place][0]))
            found = dict(zip(order, pool.map(_score, [tasks[place] for place in order]), strict=True))
            return [_scaled(found[place], tasks[place][1]) for place in range(len(tasks))]

        yield score


def _scaled(score: Score | Refused, fidelity: Fidelity) -> Score | Refused:
    """Returns a score of the model as that of the whole cluster."""
    if isinstance(score, Refused) or fidelity.scale == 1:
        return score
    return replace(score, tokens_per_s=score.tokens_per_s * fidelity.scale)
