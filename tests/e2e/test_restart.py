"""A run that loses a process of a trainer starts again from its newest checkpoint, within the same command."""

import gc
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from interlace.core import processes
from interlace.core.errors import RemoteError, RestartBudgetError, WorkerDiedError
from interlace.core.types import Metrics, SampleKey, TerminalEvent
from interlace.flows.run import PolicyRun
from interlace.observe.goodput import Ledger
from interlace.observe.headline import REWARD, Headline
from interlace.observe.loggers.base import RunInfo
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.callbacks import Callbacks, StepInfo
from interlace.run.chaos.certificate import EndedKey, SampleCounts
from interlace.run.chaos.real import role_processes
from interlace.run.evaluation import Evaluation
from interlace.run.evaluator import Evaluator
from interlace.run.recipe.load import load_recipe
from interlace.run.session import RunProcess
from interlace.run.state import RunState
from interlace.run.train import train
from interlace.workers.actor import ActorWorker
from tests.support.training import SMALL, equal_weights, final_weights, metrics, run, samples, shared_cache

SETTINGS = ("steps=5", "checkpoint_every=2", "warmup=null", "evaluation.num_prompts=1")


class KillAfterStep(QuietProgress):
    """Sends a signal to one process of the run after a step, once."""

    def __init__(self, step: int, find: Callable[[], Sequence[int]], sent: signal.Signals = signal.SIGKILL) -> None:
        self.said: list[str] = []
        self._sent = sent
        self._step, self._find = step, find
        self.killed: list[int] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, step: int, metrics: Metrics, headline: Headline = REWARD) -> None:
        if step == self._step and not self.killed:
            self.killed.append(self._find()[-1])
            os.kill(self.killed[0], self._sent)


def actor_ranks() -> Sequence[int]:
    return role_processes("actor")


def check_restarted(
    root: Path, settings: Sequence[str], cause: str = "died", sent: signal.Signals = signal.SIGKILL
) -> None:
    run(root, "whole", settings)
    notes = KillAfterStep(3, actor_ranks, sent)
    report = run(root, "struck", settings, progress=notes)
    assert notes.killed and report.done_steps == 5
    [said] = [text for text in notes.said if "starts again from its newest checkpoint" in text]
    assert said.startswith("actor/0") and cause in said
    assert metrics(root, "struck") == metrics(root, "whole")
    assert samples(root, "struck") == samples(root, "whole")
    assert equal_weights(final_weights(root, "struck"), final_weights(root, "whole"))
    assert not Path(f"/proc/{notes.killed[0]}").exists()


@pytest.mark.slow  # six processes that import torch
def test_a_run_that_loses_a_local_rank_of_its_trainer_ends_with_the_same_weights(tmp_path: Path) -> None:
    check_restarted(tmp_path, [*SETTINGS, "actor.ranks=2"])


def fail_in_step_4(monkeypatch: pytest.MonkeyPatch, error: Exception, minibatch: int = 7) -> None:
    """Raises an error in the trainer, once: at its seventh mini-batch, of two in each step."""
    accumulate, calls = ActorWorker.accumulate, []

    def fail_once(self: ActorWorker, *given: object) -> object:
        calls.append(given)
        if len(calls) == minibatch:
            raise error
        return accumulate(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(ActorWorker, "accumulate", fail_once)


def test_a_start_from_memory_repeats_fewer_steps_than_one_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["steps=5", "checkpoint_every=4", "warmup=null", "evaluation.num_prompts=1"]
    run(tmp_path, "whole", settings)
    fail_in_step_4(monkeypatch, ConnectionResetError("reset by peer"))
    notes = KillAfterStep(-1, list)
    memory = "recovery.memory_checkpoint_every=1"
    report = run(tmp_path, "lost", [*settings, memory], progress=notes)
    assert report.done_steps == 5
    [resumed] = [text for text in notes.said if text.startswith("resuming after")]
    # The checkpoint of step 3 may not be complete when the trainer fails in step 4.
    assert re.match("resuming after step [23] from /dev/shm/interlace-", resumed)
    assert not Path(resumed.rpartition(" ")[2]).exists()
    assert metrics(tmp_path, "lost") == metrics(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path, "lost"), final_weights(tmp_path, "whole"))


INFOS: list[RunInfo] = []


class KeepingInfo:
    """Logger that keeps the facts from which it was made."""

    def __init__(self, info: RunInfo) -> None:
        INFOS.append(info)

    def log(self, step: int, metrics: Metrics) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_start_without_a_checkpoint_continues_the_run_of_the_loggers_and_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, ledgers = PolicyRun.ledger, dict[PolicyRun, Ledger]()

    def keep(self: PolicyRun) -> Ledger:
        ledgers[self] = measure(self)
        return ledgers[self]

    monkeypatch.setattr(PolicyRun, "ledger", keep)
    INFOS.clear()
    fail_in_step_4(monkeypatch, ConnectionResetError("reset by peer"), minibatch=3)
    logger = f"logging.loggers=[{KeepingInfo.__module__}:KeepingInfo]"
    report = run(tmp_path, "lost", ["steps=2", "warmup=null", "evaluation.num_prompts=1", logger])
    assert report.done_steps == 2
    assert [info.resumed_at for info in INFOS] == [None, 0], "the metrics of the lost process are void"
    assert len(ledgers) == 2
    assert report.ledger.total_s == pytest.approx(sum(each.total_s for each in ledgers.values()))


def test_checkpoints_on_disk_have_their_own_step_s_weights_after_the_memory_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["steps=3", "warmup=null", "evaluation.num_prompts=1"]
    run(tmp_path, "whole", settings)
    usage = shutil.disk_usage
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage(path)._replace(free=0 if "shm" in Path(path).parts else 1 << 40)
    )
    notes = KillAfterStep(-1, list)
    run(tmp_path, "full", [*settings, "recovery.memory_checkpoint_every=1"], progress=notes)
    assert any("no further checkpoints in memory" in text for text in notes.said)
    assert equal_weights(final_weights(tmp_path, "full"), final_weights(tmp_path, "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["actor.ranks=2", pytest.param("cluster.backend=ray", marks=pytest.mark.ray)])
def test_a_run_whose_rank_is_stopped_ends_it_and_ends_with_the_same_weights(tmp_path: Path, setting: str) -> None:
    stopped = "was killed, because a signal had stopped it"
    check_restarted(tmp_path, [*SETTINGS, "reward.workers=0", setting], stopped, signal.SIGSTOP)


@pytest.mark.slow  # waits for cluster.hang_after_s, which must be longer than the start of a rank
def test_a_run_whose_rank_hangs_ends_it_and_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "is_stopped", lambda process: False)  # as on another machine
    settings = [*SETTINGS, "actor.ranks=2", "cluster.hang_after_s=45"]
    check_restarted(tmp_path, settings, "did not answer", signal.SIGSTOP)


@pytest.mark.parametrize("error", [ConnectionResetError("reset by peer"), ValueError("a mistake")])
def test_a_run_starts_again_after_a_lost_connection_of_its_trainer_and_not_after_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_in_step_4(monkeypatch, error)
    notes = KillAfterStep(99, actor_ranks)
    if isinstance(error, ValueError):
        with pytest.raises(RemoteError, match="a mistake"):
            run(tmp_path, "failed", SETTINGS, progress=notes)
        return
    assert run(tmp_path, "failed", SETTINGS, progress=notes).done_steps == 5
    assert any("ConnectionResetError" in text and "starts again" in text for text in notes.said)
    monkeypatch.undo()
    run(tmp_path, "whole", SETTINGS)
    assert equal_weights(final_weights(tmp_path, "failed"), final_weights(tmp_path, "whole"))


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_that_loses_its_trainer_on_ray_ends_with_the_same_weights(tmp_path: Path) -> None:
    check_restarted(tmp_path, [*SETTINGS, "cluster.backend=ray", "reward.workers=0"])


def test_a_start_that_fails_deletes_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its roles are joined, a process does not have the step of the best checkpoint, which must stay."""
    settings = ("steps=3", "warmup=null", "evaluation.num_prompts=1", "checkpoint_every=1", "keep_checkpoints=3")
    run(tmp_path, "kept", settings)

    async def fail(*given: object) -> None:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(RunProcess, "_launch", fail)
    with pytest.raises(ConnectionResetError):
        run(tmp_path, "kept", [*settings, "steps=4", "keep_checkpoints=1"], resume=True)
    assert len([*(tmp_path / "kept" / "checkpoints").glob("step_*")]) == 3


def test_the_failed_process_of_a_run_is_freed_before_the_next_one(tmp_path: Path) -> None:
    num_alive: list[int] = []
    before = [each for each in gc.get_objects() if isinstance(each, RunProcess)]  # of earlier tests

    class LoseFirst(QuietProgress):
        def step(self, step: int, metrics: Metrics, headline: Headline = REWARD) -> None:
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


SLOW = ("schedule.concurrency=1", "sampling.max_new_tokens=128")
"""One long sample at a time, so that groups are unfinished at each boundary."""


class LoseTrainer(QuietProgress):
    """Ends the run after these steps as a dead trainer does, once each."""

    def __init__(self, *steps: int) -> None:
        self._steps = set(steps)

    def step(self, step: int, metrics: Metrics, headline: Headline = REWARD) -> None:
        if step in self._steps:
            self._steps.remove(step)
            raise WorkerDiedError("actor/0[rank 0] died")


def count_samples(root: Path, name: str) -> SampleCounts:
    rows = samples(root, name)
    keys = [EndedKey(int(str(row["group"])), int(str(row["index"])), str(row["event"])) for row in rows]
    return SampleCounts.of(keys, 4)


def test_each_sample_of_an_asynchronous_run_ends_once_after_restarts_and_a_resume(tmp_path: Path) -> None:
    """areal generates up to eight steps ahead, so that each checkpoint has groups in flight."""
    settings = ("warmup=null", "evaluation.num_prompts=1", "checkpoint_every=2", "schedule=areal")
    run(tmp_path, "lost", ["steps=6", *settings], progress=LoseTrainer(3, 5), stop_after=6)
    run(tmp_path, "lost", ["steps=8", *settings], resume=True, stop_after=7)
    saved = RunState.read(tmp_path / "lost" / "checkpoints" / "step_7")
    assert {group.gid for group in saved.in_flight} <= {int(str(row["group"])) for row in samples(tmp_path, "lost")}
    run(tmp_path, "lost", ["steps=9", *settings], resume=True)
    counts = count_samples(tmp_path, "lost")
    assert (counts.lost, counts.duplicated, counts.events) == (0, 0, {"trained": 9 * 4 * 4})


def test_a_group_that_ends_during_an_evaluation_ends_once_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, dropped = Evaluator.evaluate, []

    async def drop_group(self: Evaluator) -> Evaluation:
        admission = self._run.admission
        first = {gid: admission.channel.record(SampleKey(gid, 0)) for gid in admission.live_gids()}
        for gid in [gid for gid, sample in first.items() if sample.advantages is None][-1:]:
            dropped.append(gid)
            admission.retire(gid, TerminalEvent.FILTERED)
        return await evaluate(self)

    monkeypatch.setattr(Evaluator, "evaluate", drop_group)
    settings = ("steps=4", "warmup=null", "evaluation.num_prompts=1", "eval_every=1", "schedule=areal", *SLOW)
    run(tmp_path, "lost", [*settings, "checkpoint_every=1"], progress=LoseTrainer(2))
    counts = count_samples(tmp_path, "lost")
    assert dropped and (counts.lost, counts.duplicated) == (0, 0)


@pytest.mark.slow  # two processes that import torch
def test_without_restarts_the_loss_ends_the_run(tmp_path: Path) -> None:
    off = "recovery.restarts_per_hour={trainer: 0}"
    with pytest.raises(WorkerDiedError, match=r"actor/0.* died"):
        run(tmp_path, "ended", [*SETTINGS, "actor.ranks=2", off], progress=KillAfterStep(3, actor_ranks))
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


@pytest.mark.parametrize(("owner", "name"), [(Evaluator, "evaluate"), (ActorWorker, "copy_checkpoint")])
def test_a_run_that_a_callback_ends_makes_no_other_step_after_a_loss_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """The loss is after the last checkpoint, or before it."""
    requests: list[int] = []

    def stop_once(step: StepInfo) -> None:
        if step.step == 2 and not requests:
            requests.append(step.step)
            step.stop()

    work, losses = getattr(owner, name), list[int]()

    def lose_once(*given: object) -> object:
        if requests and not losses:
            losses.append(1)
            raise ConnectionResetError("reset by peer") if owner is ActorWorker else WorkerDiedError("actor/0 died")
        return work(*given)

    monkeypatch.setattr(owner, name, lose_once)
    recipe = load_recipe("quickstart", [*SMALL, shared_cache(), "warmup=null", "evaluation.num_prompts=1"])
    folder = RunFolder.create(tmp_path, "ended")
    folder.write_config(recipe)
    progress, stop, callbacks = QuietProgress(), StopSignal(lambda: None), Callbacks([stop_once])
    report = train(recipe, folder, resume=False, progress=progress, stop=stop, callbacks=callbacks)
    assert losses and report.done_steps == 2 and report.after
    assert [row["step"] for row in metrics(tmp_path, "ended")] == [1, 2]
