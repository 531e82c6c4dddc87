"""A run that loses a process of a trainer starts again from its newest checkpoint, within the same command."""

import gc
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from interlace.core.errors import RestartBudgetError, WorkerDiedError
from interlace.core.types import Metrics
from interlace.observe.progress import QuietProgress
from interlace.run.chaos.processes import role_processes
from interlace.run.session import RunProcess
from tests.support.processes import named, running
from tests.support.training import equal_weights, final_weights, metrics, run, samples

SETTINGS = ("steps=5", "checkpoint_every=2", "warmup=null", "evaluation.num_prompts=1")


class KillAfterStep(QuietProgress):
    """Kills one process of the run after a step, once."""

    def __init__(self, step: int, find: Callable[[], Sequence[int]]) -> None:
        self.said: list[str] = []
        self._step, self._find = step, find
        self.killed: list[int] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, step: int, metrics: Metrics) -> None:
        if step == self._step and not self.killed:
            self.killed.append(self._find()[-1])
            os.kill(self.killed[0], signal.SIGKILL)


def local_ranks() -> Sequence[int]:
    return running(os.getpid(), "multiprocessing.spawn")


def ray_ranks() -> Sequence[int]:
    return named(os.getpid(), "ray::RankActor")


def check_restarted(root: Path, settings: Sequence[str], find: Callable[[], Sequence[int]]) -> None:
    run(root, "whole", settings)
    notes = KillAfterStep(3, find)
    report = run(root, "killed", settings, progress=notes)
    assert notes.killed and report.done_steps == 5
    assert any("actor/0" in text and "starts again from its newest checkpoint" in text for text in notes.said)
    assert metrics(root, "killed") == metrics(root, "whole")
    assert samples(root, "killed") == samples(root, "whole")
    assert equal_weights(final_weights(root, "killed"), final_weights(root, "whole"))


@pytest.mark.slow  # six processes that import torch
def test_a_run_that_loses_a_local_rank_of_its_trainer_ends_with_the_same_weights(tmp_path: Path) -> None:
    check_restarted(tmp_path, [*SETTINGS, "actor.ranks=2"], local_ranks)


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_that_loses_its_trainer_on_ray_ends_with_the_same_weights(tmp_path: Path) -> None:
    check_restarted(tmp_path, [*SETTINGS, "cluster.backend=ray", "reward.workers=0"], ray_ranks)


def test_the_failed_process_of_a_run_is_freed_before_the_next_one(tmp_path: Path) -> None:
    num_alive: list[int] = []
    before = [each for each in gc.get_objects() if isinstance(each, RunProcess)]  # of earlier tests

    class LoseFirst(QuietProgress):
        def step(self, step: int, metrics: Metrics) -> None:
            alive = [each for each in gc.get_objects() if isinstance(each, RunProcess)]
            num_alive.append(len(alive) - len(before))
            if len(num_alive) == 1:
                raise WorkerDiedError("actor/0[rank 0] died")

    gc.disable()
    try:
        run(tmp_path, "freed", ["steps=2", "warmup=null", "evaluation.num_prompts=1"], progress=LoseFirst())
    finally:
        gc.enable()
    assert num_alive[:2] == [1, 1]


@pytest.mark.slow  # two processes that import torch
def test_without_restarts_the_loss_ends_the_run(tmp_path: Path) -> None:
    off = "recovery.restarts_per_hour={trainer: 0}"
    with pytest.raises(WorkerDiedError, match=r"actor/0.* died"):
        run(tmp_path, "ended", [*SETTINGS, "actor.ranks=2", off], progress=KillAfterStep(3, local_ranks))
    assert len(metrics(tmp_path, "ended")) == 3


@pytest.mark.slow
def test_an_exhausted_budget_saves_the_last_step_and_the_run_can_be_resumed_to_the_same_weights(tmp_path: Path) -> None:
    settings = (*SETTINGS, "checkpoint_every=0", "reward.workers=1")
    run(tmp_path, "whole", settings)
    budget = "recovery.restarts_per_hour={reward: 0}"
    with pytest.raises(RestartBudgetError, match=r"recovery\.restarts_per_hour\.reward is 0"):
        run(tmp_path, "ended", [*settings, budget], progress=KillAfterStep(3, lambda: role_processes("reward")))
    assert [path.name for path in (tmp_path / "ended" / "checkpoints").glob("step_*")] == ["step_3"]
    run(tmp_path, "ended", settings, resume=True)
    assert samples(tmp_path, "ended") == samples(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path, "ended"), final_weights(tmp_path, "whole"))
