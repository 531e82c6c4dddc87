"""The best checkpoint of a run: it is written, kept and found again; a run without improvement ends early."""

import sys
from collections.abc import Mapping
from pathlib import Path

from interlace.core.errors import UserError, nearest
from interlace.observe.best import EVALUATION, BestConfig, read_best
from interlace.observe.checkpoints import Checkpoints, read_identity
from interlace.observe.progress import ProgressView
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import RunIdentity, check_identity, read_run_id

NEWEST, BEST = "newest", "best"
"""Choices of a checkpoint, in addition to the number of a step."""


class BestKeeper:
    """Follows the metric of `best` in a run that trains. Without the section, no step is the best."""

    def __init__(
        self, config: BestConfig | None, folder: RunFolder, checkpoints: Checkpoints, progress: ProgressView
    ) -> None:
        """folder: its logs end at the step from which the run continues."""
        self._config, self._checkpoints, self._progress = config, checkpoints, progress
        self._tracker = read_best(config, folder, checkpoints.steps()) if config else None
        self.wants_stop = False
        """True if the metric has not improved for as many measurements as the run allows."""
        if self._tracker:
            checkpoints.keep_best(self._tracker.step)

    def check_evaluation(self, metrics: Mapping[str, object]) -> None:
        """Raises UserError if the first evaluation does not measure the metric."""
        if self._config and self._config.is_evaluated:
            self._check_name(metrics, "evaluations have")

    def observe(self, step: int, metrics: Mapping[str, object]) -> bool:
        """Takes the metrics of a step. Returns True if the step is the best so far; its checkpoint is to be written.

        Raises UserError if a metric of each step is missing.
        """
        if not self._tracker or not self._config:
            return False
        if not self._config.is_evaluated:
            self._check_name(metrics, f"step {step} has")
        if self._config.metric not in metrics:
            return False
        if self._tracker.observe(step, metrics):
            return True
        if self._tracker.is_exhausted and not self.wants_stop:
            self.wants_stop = True
            self._progress.say(
                f"the run ends after step {step}: {self._config.metric} has not improved in {self._tracker.num_since} "
                f"measurements (best.patience={self._config.patience}). The best is {self._tracker.value:.4g}, of step "
                f"{self._tracker.step}."
            )
        return False

    def observe_final(self, step: int, metrics: Mapping[str, object]) -> bool:
        """Takes the evaluation after the last step, whose checkpoint exists. Returns True if it is the best so far."""
        return bool(self._tracker and self._tracker.observe(step, metrics))

    def mark(self, step: int) -> None:
        """Keeps the checkpoint of the step instead of the earlier best one."""
        self._checkpoints.keep_best(step)

    def _check_name(self, metrics: Mapping[str, object], owner: str) -> None:
        if self._config and self._config.metric not in metrics:
            same = [name for name in metrics if name.startswith(EVALUATION) == self._config.is_evaluated]
            raise UserError(
                f"best.metric = {self._config.metric!r}: {owner} no such metric.{nearest(self._config.metric, same)}"
            )


def choose_checkpoint(run: RunFolder, best: BestConfig | None, choice: str | int) -> Path:
    """Returns a checkpoint of a run: the newest whole one, the best one, or the one of a step.

    best: the run's section `best`. choice: `newest`, `best` or a step. Raises UserError if there is no such checkpoint,
    or if it is of another run or step.
    """
    path = _find_checkpoint(run, best, choice)
    run_id, found = read_run_id(run.path), read_identity(path)
    if run_id and found:
        check_identity(path, found, RunIdentity(run=run_id, model=found.model))
    return path


def _find_checkpoint(run: RunFolder, best: BestConfig | None, choice: str | int) -> Path:
    checkpoints = Checkpoints(run.checkpoints, keep=1)
    if str(choice) == NEWEST:
        return _find_newest(run, checkpoints)
    steps = checkpoints.steps()
    if not steps:
        raise _no_checkpoint(run, "checkpoint yet")
    listed = ", ".join(map(str, steps))
    if str(choice) == BEST:
        if best is None:
            raise UserError(
                f"run {run.path} has no best checkpoint, because it was trained without `best`. Start a run with "
                f"best=METRIC, such as best=eval/accuracy_greedy, or choose newest or one of the steps {listed}."
            )
        step = read_best(best, run, steps).step
        if step is None:
            raise UserError(
                f"run {run.path} has not measured {best.metric} at a step with a checkpoint. Choose newest or one of "
                f"the steps {listed}."
            )
        return checkpoints.path(step)
    if not str(choice).isdecimal() or int(choice) not in steps:
        raise UserError(
            f"checkpoint {str(choice)!r}: run {run.path} has no such one. Choose newest, best or one of the steps "
            f"{listed}."
        )
    return checkpoints.path(int(choice))


def _find_newest(run: RunFolder, checkpoints: Checkpoints) -> Path:
    found = checkpoints.newest_whole()
    for path, damage in found.damaged.items():
        print(f"{path} {damage}", file=sys.stderr)  # noqa: T201 - the caller may be quiet
    if found.path is None:
        raise _no_checkpoint(run, "whole checkpoint" if found.damaged else "checkpoint yet")
    return found.path


def _no_checkpoint(run: RunFolder, missing: str) -> UserError:
    return UserError(f"run {run.path} has no {missing}; it writes one at its end, or every checkpoint_every steps.")
