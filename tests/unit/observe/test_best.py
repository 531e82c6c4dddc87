"""The best step by a metric: ties, directions, patience, lost checkpoints, and the same result from the logs."""

import math
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.best import BestConfig, BestTracker, read_best
from interlace.observe.jsonl import write_step
from interlace.observe.run_folder import RunFolder


def follow(config: BestConfig, values: list[float]) -> tuple[BestTracker, list[int]]:
    tracker = BestTracker(config)
    return tracker, [step for step, value in enumerate(values, 1) if tracker.observe(step, {config.metric: value})]


@pytest.mark.parametrize(
    ("config", "values", "better"),
    [
        ({"metric": "reward/mean"}, [1.0, 1.0, 3.0, 2.0], [1, 3]),
        ({"metric": "eval/loss"}, [3.0, 2.0, 2.5, math.nan, 1.0], [1, 2, 5]),
        ({"metric": "eval/loss", "mode": "max"}, [3.0, 2.0, 4.0], [1, 3]),
        ({"metric": "actor/teacher_kl"}, [3.0, 2.0, 4.0], [1, 2]),
        ({"metric": "world_model/error_5"}, [3.0, 2.0, 4.0], [1, 2]),
        ({"metric": "valloss"}, [3.0, 2.0, 4.0], [1, 2]),
        ({"metric": "eval/errors/accuracy_greedy"}, [3.0, 2.0, 4.0], [1, 3]),
        ({"metric": "reward/gap"}, [3.0, 2.0, 4.0], [1, 3]),
        ({"metric": "eval/lossless"}, [3.0, 2.0, 4.0], [1, 3]),
        ({"metric": "reward/mean", "min_delta": 0.5}, [1.0, 1.5, 1.6], [1, 3]),
    ],
)
def test_steps_that_are_better(config: dict[str, object], values: list[float], better: list[int]) -> None:
    assert follow(BestConfig.parse(config), values)[1] == better


def test_patience_counts_measurements() -> None:
    tracker, _ = follow(BestConfig(metric="a", patience=2), [1.0, 0.5])
    assert not tracker.is_exhausted
    assert not tracker.observe(3, {"other": 1.0}) and not tracker.is_exhausted, "a step without the metric is none"
    assert not tracker.observe(4, {"a": math.nan}) and tracker.is_exhausted


def test_the_logs_give_the_same_result_and_lost_checkpoints_do_not_count(tmp_path: Path) -> None:
    folder, config = RunFolder(path=tmp_path), BestConfig(metric="eval/x")
    for step, value in enumerate([9.0, 1.0, math.nan, 5.0, 4.0]):
        write_step(folder.evaluations, step, {"eval/x": value})
        if step:
            write_step(folder.metrics, step, {"eval/x": value})
    found = read_best(config, folder, [1, 3, 4])
    assert (found.step, found.value, found.num_since) == (3, 5.0, 1), "step 0 has no checkpoint"
    assert (read_best(config, folder, [1, 4]).step, read_best(config, folder, [2]).step) == (4, None)


def test_the_evaluation_at_the_end_of_a_command_does_not_count_for_the_patience_of_the_resumed_run(
    tmp_path: Path,
) -> None:
    folder, config = RunFolder(path=tmp_path), BestConfig(metric="eval/x", patience=2)
    for step, value in {2: 5.0, 4: 4.0}.items():
        write_step(folder.evaluations, step, {"eval/x": value})
        write_step(folder.metrics, step, {"eval/x": value})
    write_step(folder.metrics, 5, {"reward/mean": 1.0})
    write_step(folder.evaluations, 5, {"eval/x": 4.5})
    assert read_best(config, folder, [2, 5]).num_since == 1
    write_step(folder.evaluations, 5, {"eval/x": 6.0})
    assert read_best(config, folder, [2, 5]).step == 5, "the best checkpoint may be of this evaluation"


def test_bad_settings() -> None:
    for bad in ({"metric": ""}, {"metric": "a", "patience": 0}, {"metric": "a", "min_delta": -1}, {"mode": "max"}):
        with pytest.raises(UserError):
            BestConfig.parse(bad)
