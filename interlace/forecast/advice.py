"""Suggestions for a run: single settings whose predicted step is shorter, under a profile of the run's records."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from interlace.core.errors import UserError
from interlace.core.plugins import builtin_names
from interlace.core.types import JSON
from interlace.forecast.profile.from_run import profile_of_run
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation, check_simulated
from interlace.observe.goodput import ledger_of
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.run.clusters.base import back_end
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from interlace.schedule import dispatch

MOST = 3
"""Suggestions at most."""
SMALLEST_SAVING = 0.05
"""Share of a step below which a predicted saving is within the error of a forecast."""
SAME_SAVING = 0.01
"""Difference of two savings below which they count as equal."""
ACCURACY = Fidelity(steps=8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A change of one setting."""

    setting: str
    """KEY=VALUE, as the command line takes it."""
    saving: float
    """Predicted share of a step's time that is saved, between 0 and 1."""
    step_s: float
    """Predicted seconds of a step with the change."""
    staleness_max: float
    """Largest staleness of a trained sample with the change, in versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Suggestions for a run, the best first."""

    waste: str
    """Sentence about the largest bin of the run's ledger that is not useful work; empty if there is none."""
    step_s: float
    """Predicted seconds of a step without a change."""
    staleness_max: float
    num_tried: int
    """Number of settings that were simulated."""
    suggestions: tuple[Suggestion, ...]

    def row(self) -> dict[str, JSON]:
        """Returns the advice as JSON."""
        return {**asdict(self), "suggestions": [asdict(each) for each in self.suggestions]}

    @property
    def lines(self) -> list[str]:
        """Returns the text for people, a line for each suggestion."""
        found = [self.waste] if self.waste else []
        for each in self.suggestions:
            stale = ""
            if each.staleness_max > self.staleness_max:
                stale = f"; trains samples up to {each.staleness_max:g} versions stale (now {self.staleness_max:g})"
            saved = f"predicted saving {each.saving:.0%} of a step ({self.step_s:.3g} s -> {each.step_s:.3g} s)"
            found.append(f"{each.setting}: {saved}{stale}")
        if not self.suggestions:
            found.append(
                f"None of {self.num_tried} single settings saves {SMALLEST_SAVING:.0%} of a step. "
                "`interlace plan` searches combinations."
            )
        return found


def advise(folder: RunFolder) -> Advice:
    """Simulates changes of single settings under the costs of the run's records, and returns the best ones.

    Each change passes the checks of training. Raises UserError if the records do not give a profile; see
    profile_of_run.
    """
    recipe, profile = profile_of_run(folder)
    num_devices = len(back_end(recipe.cluster).find_devices(recipe.cluster))
    simulation = Simulation(profile=profile, num_devices=num_devices)
    now = _predict_score(recipe, simulation)
    if now is None:
        raise UserError(f"run {folder.path} cannot be simulated with the costs of its records. Try `interlace plan`.")
    waste = ledger_of(RunData.read(folder).rows).largest_waste()
    num_tried, found = 0, []
    for setting in settings_to_try(recipe):
        try:
            score = _predict_score(load_recipe(str(folder.config), [setting]), simulation)
        except UserError:  # the recipe cannot have this setting
            continue
        num_tried += 1
        saving = 1 - score.step_s / now.step_s if score else 0.0
        if score and saving >= SMALLEST_SAVING:
            found.append(
                Suggestion(
                    setting=setting, saving=saving, step_s=score.step_s, staleness_max=score.staleness_max
                )
            )  # fmt: skip
    return Advice(
        waste=waste.sentence if waste else "",
        step_s=now.step_s,
        staleness_max=now.staleness_max,
        suggestions=tuple(_choose(found)),
        num_tried=num_tried,
    )


def _choose(found: list[Suggestion]) -> list[Suggestion]:
    """Returns the best suggestion of each key, the best first. Of almost equal ones the first is kept: the smallest
    change.
    """
    best: dict[str, Suggestion] = {}
    for each in found:
        key = each.setting.partition("=")[0]
        if key not in best or each.saving > best[key].saving + SAME_SAVING:
            best[key] = each
    return sorted(best.values(), key=lambda each: each.step_s)[:MOST]


def settings_to_try(recipe: Recipe) -> Iterator[str]:
    """Yields changes of the settings that govern the bins of the ledger (observe.goodput.GOVERNED_BY), as KEY=VALUE."""
    schedule = recipe.schedule.resolved
    yield f"rollout.max_running={2 * recipe.rollout.max_running}"
    yield from (f"schedule.dispatch={name}" for name in builtin_names(dispatch) if name != schedule.dispatch)
    for stage in ("reward", "reference", "critic", "actor"):
        now = schedule.granularity.of(stage)
        yield from (f"schedule.granularity.{stage}={granule}" for granule in ("group", "sample") if granule != now)
    yield from (f"schedule.max_staleness={schedule.max_staleness + more:g}" for more in (1, 2))
    yield from (f"schedule.batching={name}" for name in ("arrival", "step") if name != schedule.batching)
    yield "schedule.publish=background"
    yield "schedule.on_update=keep"


def _predict_score(recipe: Recipe, simulation: Simulation) -> Score | None:
    """Returns the prediction; None if the schedule cannot run. Raises UserError if a check of training refuses it."""
    profile = simulation.profile
    # A profile has the limit of the run's engines, and the recipe may have another one.
    rollout = profile.rollout.model_copy(update={"max_running": recipe.rollout.max_running})
    here = replace(simulation, profile=profile.model_copy(update={"rollout": rollout}))
    check_simulated({"": recipe}, here.profile, here.devices)
    score = Workplace(recipe=recipe, simulation=here).score(recipe.schedule.resolved, ACCURACY)
    return score if isinstance(score, Score) else None
