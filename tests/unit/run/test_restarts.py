"""Limits of restarts of a whole run."""

from pathlib import Path

import pytest

from interlace.core.errors import HangError, InterlaceError, RemoteError, WorkerDiedError, WorkerHungError
from interlace.core.recovery import HOUR_S, RecoveryConfig
from interlace.observe.goodput import Ledger
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run import train as training
from interlace.run.boundary import TrainJob
from interlace.run.recipe.config import AUTO, set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.run.session import TrainReport
from interlace.run.train import RunRestarts, describe_loss
from interlace.schedule.schedule import Schedule


def restarts(per_hour: int, in_a_row: int, times_s: list[float] | None = None) -> RunRestarts:
    config = RecoveryConfig(restarts_per_hour={"trainer": per_hour}, restarts_in_a_row=in_a_row)
    times = iter(times_s or [0.0] * 10)
    return RunRestarts(config, lambda: next(times))


def test_zero_turns_restarts_off() -> None:
    error = WorkerDiedError("actor/0[rank 0] died")
    assert not restarts(0, 3).allow(error, done_steps=5)
    assert not getattr(error, "__notes__", [])


def test_the_budget_of_an_hour_ends_the_run_with_the_reason() -> None:
    counted = restarts(2, 9, [0.0, 1.0, 2.0, HOUR_S + 1.5])
    error = WorkerDiedError("actor/0[rank 0] died")
    assert [counted.allow(error, done_steps=step) for step in (1, 2, 3)] == [True, True, False]
    assert "recovery.restarts_per_hour.trainer is 2" in error.__notes__[0]
    assert counted.allow(error, done_steps=4), "an hour later, two restarts are no longer counted"


def test_restarts_without_a_new_step_end_the_run() -> None:
    counted, error = restarts(99, 2), WorkerDiedError("actor/0[rank 0] died")
    assert [counted.allow(error, done_steps=step) for step in (4, 4, 5, 5)] == [True] * 4
    # The run repeats steps from its checkpoint; these are not new.
    assert not counted.allow(error, done_steps=3)
    assert "recovery.restarts_in_a_row" in error.__notes__[0]


def remote(last_line: str) -> RemoteError:
    return RemoteError("actor/0", 0, "accumulate", f"Traceback (most recent call last):\n  File ...\n{last_line}\n")


@pytest.mark.parametrize(
    ("error", "is_allowed"),
    [
        (WorkerHungError("actor/0[rank 1] did not answer"), True),
        (HangError("nothing can go on"), False),
        (remote("ConnectionResetError: [Errno 104] Connection reset by peer"), True),
        (remote("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed"), True),
        (remote("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690"), True),
        (remote("torch.distributed.DistBackendError: NCCL error in: X.cpp:3690\nncclSystemError: System call"), True),
        (remote("RuntimeError: CUDA error: uncorrectable ECC error\nCompile with `TORCH_USE_CUDA_DSA`"), True),
        (remote("ValueError: no number\nConnectionResetError is its name"), False),
        (remote("OSError: [Errno 116] Stale file handle"), True),
        (remote("FileNotFoundError: [Errno 2] No such file or directory: 'data'"), False),
        (remote("RuntimeError: CUDA out of memory"), False),
        (remote("ValueError: ConnectionResetError is no number"), False),
    ],
)
def test_a_run_starts_again_after_losses_and_not_after_mistakes(error: InterlaceError, is_allowed: bool) -> None:
    assert restarts(9, 9).allow(error, done_steps=1) is is_allowed


def test_a_loss_is_described_in_one_line() -> None:
    found = describe_loss(remote("ConnectionResetError: reset"))
    assert found == "actor/0[rank 0].accumulate() raised: ConnectionResetError: reset."


class Planned:
    """Planner that has decided on another schedule."""

    def __init__(self, wanted: Schedule) -> None:
        self.schedule, self.change = Schedule(), wanted

    def take_change(self) -> Schedule | None:
        taken, self.change = self.change, None  # type: ignore[assignment]
        self.schedule = taken or self.schedule
        return taken

    def fit_devices(self, num_devices: int) -> Schedule:
        return self.schedule


def test_a_restart_after_a_loss_also_makes_the_planned_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Schedule(min_hold=1.0)
    planner, started = Planned(wanted), list[Schedule]()

    class Process:
        """Process that loses a worker while it saves for the planned change, or ends for this change."""

        done_steps, ledger, end_step = 2, Ledger(), None

        def __init__(self, job: TrainJob, *_: object) -> None:
            started.append(job.recipe.schedule.resolved)

        async def train(self) -> TrainReport:
            if len(started) == 1:
                raise WorkerDiedError("actor/0[rank 0] died")
            done_steps = 2 if planner.change else 4
            return TrainReport(done_steps=done_steps, num_steps=4, before=None, after=None, checkpoint=None)

    monkeypatch.setattr(training, "_PolicySession", Process)
    recipe = set_schedule(load_recipe("quickstart", ["steps=4", "cluster.devices=cpu:2"]), Schedule(), AUTO)
    folder = RunFolder.create(tmp_path, "run")
    folder.write_config(recipe)
    stop = StopSignal(lambda: None)
    training.train(recipe, folder, resume=False, progress=QuietProgress(), stop=stop, planner=planner)  # type: ignore[arg-type]
    assert started == [Schedule(), wanted], "one restart"
