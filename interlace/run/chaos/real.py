"""A run of a recipe on this machine under faults, next to the same run without them."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.core.errors import InterlaceError
from interlace.core.types import TerminalEvent
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.jsonl import read_rows
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.observe.transcripts import read_transcripts
from interlace.run.callbacks import Callbacks, StepInfo
from interlace.run.chaos.certificate import Certificate, EndedKey, SampleCounts
from interlace.run.chaos.faults import FaultSpec
from interlace.run.chaos.inject import ChaosProgress, Injector
from interlace.run.equivalence import largest_difference, read_weights
from interlace.run.recipe.config import Recipe
from interlace.run.train import train

TRAINED_COLUMNS = ("step", "uid", "index", "token_ids", "reward")


class _StepClock:
    """Time of the steps of a run, with the time between them, in which a run may start again."""

    def __init__(self) -> None:
        self._since_s = math.inf
        self._ends_s: dict[int, float] = {}
        """Time of the end of each step; of the last one, if a step was repeated."""

    def on_step(self, info: StepInfo) -> None:
        """Takes note of the end of a step. Called after each step."""
        now_s = time.monotonic()
        self._since_s = min(self._since_s, now_s - info.metrics.get("timing_s/step", 0.0))
        self._ends_s[info.step] = now_s

    @property
    def last_step(self) -> int:
        """Returns the newest step that ended; 0 if none did."""
        return max(self._ends_s, default=0)

    def seconds_to(self, step: int) -> float:
        """Returns the time from the begin of the first step to the end of a step."""
        return self._ends_s[step] - self._since_s if step else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """Data of a run in its folder."""

    folder: RunFolder
    clock: _StepClock
    error: str = ""

    @property
    def staleness_max(self) -> float:
        """Returns the largest staleness of any trained sample, in versions."""
        rows = read_rows(self.folder.metrics)
        return max((float(row["sched/staleness_max"]) for row in rows), default=0.0)  # type: ignore[arg-type]

    @property
    def ended(self) -> list[EndedKey]:
        rows = read_transcripts(self.folder.samples)
        return [EndedKey(int(str(row["group"])), int(str(row["index"])), str(row["event"])) for row in rows]

    @property
    def trained(self) -> list[tuple[object, ...]]:
        """Returns the trained samples, sorted."""
        rows = [row for row in read_transcripts(self.folder.samples) if row["event"] == TerminalEvent.TRAINED]
        return sorted((tuple(row[name] for name in TRAINED_COLUMNS) for row in rows), key=str)

    @property
    def newest(self) -> Path:
        checkpoints = Checkpoints(self.folder.checkpoints, keep=1)
        return checkpoints.path(max(checkpoints.steps()))


def run_with_faults(
    recipe: Recipe, faults: Sequence[FaultSpec], scratch: Path, stop: StopSignal, say: Callable[[str], None]
) -> Certificate:
    """Trains a recipe without faults, then with them, and compares.

    scratch: folder for both runs. say: receives the name of each run as it begins. Raises InterlaceError if the run
    without faults fails, or after a stop.
    """
    quiet = recipe.logging.model_copy(update={"loggers": (), "timeline": False})
    recipe = recipe.model_copy(update={"logging": quiet})
    say("training without faults")
    folder, clock = RunFolder.create(scratch, "without-faults", overwrite=True), _StepClock()
    callbacks = Callbacks([clock.on_step])
    report = train(recipe, folder, resume=False, progress=QuietProgress(), stop=stop, callbacks=callbacks)
    if report.was_stopped:
        raise InterlaceError("stopped before the run with faults.")
    calm = _Outcome(folder=folder, clock=clock)
    say("training with faults")
    folder, clock, error = RunFolder.create(scratch, "with-faults", overwrite=True), _StepClock(), ""
    with Injector(faults, recipe.seed, folder.engines) as injector:
        callbacks = Callbacks([clock.on_step, injector.on_step])
        try:
            report = train(
                recipe,
                folder,
                resume=False,
                progress=ChaosProgress(injector),
                stop=stop,
                callbacks=callbacks,
                on_cluster=injector.phases.follow,
            )
        except InterlaceError as failure:
            error = str(failure)
    if not error and report.was_stopped:
        raise InterlaceError("stopped before the end of the run with faults.")
    return _compare_runs(recipe, injector, calm, _Outcome(folder=folder, clock=clock, error=error))


def _compare_runs(recipe: Recipe, injector: Injector, calm: _Outcome, rough: _Outcome) -> Certificate:
    schedule = recipe.schedule.resolved
    is_complete, is_exact = not rough.error, schedule.staleness_bound == 0
    counts = SampleCounts.of(rough.ended, recipe.samples_per_prompt)
    is_compared = is_complete and is_exact
    return Certificate(
        faults=injector.records,
        is_complete=is_complete,
        error=rough.error,
        events=counts.events,
        # A run that ended by an error does not know what became of the samples in flight.
        lost=counts.lost if is_complete else 0,
        duplicated=counts.duplicated,
        staleness_max=rough.staleness_max,
        staleness_bound=schedule.staleness_bound,
        step_s=rough.clock.seconds_to(rough.clock.last_step),
        step_s_without_faults=calm.clock.seconds_to(rough.clock.last_step),
        samples_equal=rough.trained == calm.trained if is_compared else None,
        weights_equal=largest_difference(read_weights(rough.newest), read_weights(calm.newest)) == 0
        if is_compared
        else None,
    )
