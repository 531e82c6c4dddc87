"""A run keeps its best checkpoint, ends early, resumes with both, and its best checkpoint is found by every reader."""

from pathlib import Path

import pytest

import interlace
from interlace.core.errors import UserError
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.jsonl import read_whole_rows
from interlace.run.library import Settings
from interlace.schedule.schedule import Schedule
from tests.support.training import run_recipe

ROWS = [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(6)]
SMALL: Settings = {
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "sampling": {"max_new_tokens": 4},
    "cluster": {"devices": "cpu:2"},
    "rollout": {"max_running": 8, "max_tokens": 512},
    "keep_checkpoints": 1,
    "logging": {"loggers": []},
}
VALUES = [1.0, 3.0, 2.0, 2.5, 1.0, 1.0]
"""Measured quality of each step: the second is the best."""


def measure(step: interlace.StepInfo) -> None:
    step.log("quality", VALUES[step.step - 1])


def train(folder: Path, steps: int, **options: object) -> interlace.TrainedRun:
    return interlace.train(
        model="tiny:micro", data=ROWS, reward=lambda response: float(len(response)), heldout_size=2, name="mine",
        folder=folder, quiet=True, callbacks=[measure], **{**SMALL, "steps": steps, **options},
    )  # type: ignore[arg-type]  # fmt: skip


def test_the_best_checkpoint_is_kept_and_the_run_ends_without_improvement(tmp_path: Path) -> None:
    first = train(tmp_path, 3, best={"metric": "quality", "patience": 3})
    assert Checkpoints(first.folder / "checkpoints", keep=1).steps() == [2, 3]
    run = train(tmp_path, 6, best={"metric": "quality", "patience": 3}, resume=True)
    assert run.outcome is not None and run.outcome.done_steps == 5, "steps 3, 4 and 5 are not better"
    assert Checkpoints(run.folder / "checkpoints", keep=1).steps() == [2, 5]
    assert run.best_checkpoint == run.folder / "checkpoints" / "step_2"
    best = interlace.load_run(run.folder, checkpoint="best")
    assert best.checkpoint == run.best_checkpoint and best.evaluate().num_prompts == 2
    assert best.evaluate(["best=null"]).num_prompts == 2, "the section `best` of the run chooses"
    assert interlace.load_run(run.folder, checkpoint=5).checkpoint == run.checkpoint
    for wrong, message in ((4, "one of the steps 2, 5"), ("bset", "Choose newest, best or")):
        with pytest.raises(UserError, match=message):
            interlace.load_run(run.folder, checkpoint=wrong)


def test_an_evaluation_measures_the_weights_of_its_step(tmp_path: Path) -> None:
    """Between two publications the engines have weights of an earlier step; the last step's are sent for the end."""
    run = train(tmp_path, 5, eval_every=1, schedule={"sync_every": 2})
    assert [row["step"] for row in read_whole_rows(run.folder / "evaluations.jsonl")] == [0, 2, 4, 5]

    def due(eval_every: int, sync_every: int) -> list[int]:
        schedule = Schedule(sync_every=sync_every)
        return [step for step in range(1, 13) if schedule.is_evaluation_due(step, eval_every=eval_every)]

    assert (due(3, 4), due(6, 4), due(4, 1), due(0, 1)) == ([4, 8, 12], [8, 12], [4, 8, 12], [])


def test_mistakes(tmp_path: Path) -> None:
    def refusal(**options: object) -> str:
        with pytest.raises(UserError) as caught:
            train(tmp_path, 2, **options)
        return str(caught.value)

    assert "with eval_every=0 there is none" in refusal(best="eval/accuracy_greedy")
    unmeasured = {"best": "eval/pass@8", "eval_every": 1, "evaluation": {"pass_at": 1}}
    assert "evaluation.pass_at=[1] does not measure it" in refusal(**unmeasured)
    assert "step 1 has no such metric. Did you mean 'quality'" in refusal(best="qualty")
    assert "Did you mean 'eval/accuracy_greedy'" in refusal(best="eval/acuracy_greedy", eval_every=1)
    sampled = {"best": "eval/accuracy_sampled", "eval_every": 1, "evaluation": {"samples_per_prompt": 0}}
    assert "samples no answers" in refusal(**sampled)
    assert not (tmp_path / "mine").exists()
    run = train(tmp_path, 1)
    with pytest.raises(UserError, match="trained without `best`"):
        interlace.load_run(run.folder, checkpoint="best")


def test_rows_are_learned_with_the_best_loss_kept(tmp_path: Path) -> None:
    settings = [
        "steps=3", "prompts_per_step=8", "task.reasoning_gym.train_size=32", "task.reasoning_gym.heldout_size=8",
        "logging.loggers=[]", "cluster.devices=cpu:2", "eval_every=1", "keep_checkpoints=1", "best=eval/loss",
        "best.min_delta=1000", "best.patience=2", f"model.cache_dir={tmp_path / 'cache'}",
    ]  # fmt: skip
    report = run_recipe("sft", tmp_path, "mine", settings)
    assert report.done_steps == 3, "the first step is the best, and two are not better"
    found = interlace.load_run("mine", folder=tmp_path, checkpoint="best")
    assert found.checkpoint == tmp_path / "mine" / "checkpoints" / "step_1"
