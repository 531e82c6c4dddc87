"""Whole runs of SAC at toy size: one flow, exact resume, any placement, clear refusals."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.report.page import write_report
from interlace.observe.run_folder import RunFolder
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.session import TrainReport
from tests.support.training import equal_weights, final_weights, metrics, run_recipe, samples

pytest.importorskip("gymnasium")
SMALL = (
    "steps=3",
    "prompts_per_step=2",
    "episode.env.settings={tasks: [Pendulum-v1], horizon: 12}",
    "episode.env.num_envs=2",
    "algorithm={name: sac, turns_per_update: 8, start_turns: 30, critic_width: 16, n_step: 3, updates_per_turn: 0.5}",
    "replay={learner: actor_critic, capacity: 5, in_memory_mib: 0.01}",
    "task.starts.train_size=64",
    "task.starts.heldout_size=2",
    "logging.loggers=[]",
    "cluster.devices=cpu:2",
    "cluster.threads_per_worker=1",
    "evaluation.num_shown=0",
)


def run(root: Path, name: str, overrides: Sequence[str] = (), **kwargs) -> TrainReport:
    return run_recipe("robot-sac", root, name, [*SMALL, f"model.cache_dir={root / 'cache'}", *overrides], **kwargs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sac")
    report = run(root, "whole")
    assert report.before is not None and report.before.num_prompts == 2
    return root


def test_a_step_says_what_was_learnt(whole: Path) -> None:
    lines = metrics(whole, "whole")
    assert [line["replay/transitions"] for line in lines] == [24, 48, 60], "the capacity is five episodes"
    assert "off_policy/updates" not in lines[0], "fewer turns than start_turns"
    for line in lines[1:]:
        assert line["off_policy/updates"] == 12 and line["off_policy/critic_loss"] > 0
        assert 0 < line["off_policy/temperature"] < 1.1
        assert line["samples/trained"] == 2 and "actor/loss" not in line


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(whole: Path) -> None:
    assert run(whole, "stopped", stop_after=2).was_stopped
    assert run(whole, "stopped", resume=True).done_steps == 3
    assert samples(whole, "stopped") == samples(whole, "whole")
    assert equal_weights(final_weights(whole, "stopped"), final_weights(whole, "whole"))
    ours, theirs = metrics(whole, "stopped")[-1], metrics(whole, "whole")[-1]
    assert {key: ours[key] for key in ours if key.startswith("off_policy/")} == {
        key: theirs[key] for key in theirs if key.startswith("off_policy/")
    }


@pytest.mark.slow
def test_a_resumed_run_keeps_the_priorities_of_turns(whole: Path) -> None:
    rule = ["replay={learner: actor_critic, capacity: 5, order: priority, priority_exponent: 0.6}"]
    run(whole, "priorities", rule)
    run(whole, "priorities-stopped", rule, stop_after=2)
    assert run(whole, "priorities-stopped", rule, resume=True).done_steps == 3
    assert equal_weights(final_weights(whole, "priorities-stopped"), final_weights(whole, "priorities"))
    assert not equal_weights(final_weights(whole, "priorities"), final_weights(whole, "whole"))


@pytest.mark.parametrize(
    "overrides", [("episode.env.workers=2",), ("schedule.preset=rlinf-disaggregated",)], ids=["workers", "apart"]
)
def test_no_placement_changes_what_is_learnt(whole: Path, overrides: Sequence[str]) -> None:
    name = overrides[0][-7:].replace("=", "")
    run(whole, name, overrides)
    for ours, theirs in zip(samples(whole, name), samples(whole, "whole"), strict=True):
        assert ours["uid"] == theirs["uid"] and ours["reward"] == pytest.approx(theirs["reward"], rel=1e-3)
    mine, its = final_weights(whole, name), final_weights(whole, "whole")
    assert max(float((mine[key] - its[key]).abs().max()) for key in its) < 1e-3


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["replay=null"], "replay.learner=actor_critic"),
        (["algorithm=grpo", "samples_per_prompt=2"], "replay.learner=actor_critic"),
        (["model.robot.head=gaussian"], "head=squashed"),
        (["minibatches=2"], "minibatches=2"),
        (["task.starts.instructions=[one, two]", "task.starts.tasks=[0, 0]"], "one instruction"),
        (["replay.max_rounds=3"], "max_rounds"),
        (["algorithm=iql", "replay.order=priority"], "replay.order=priority"),
        (["algorithm=awr", "algorithm.offline_updates=3"], "replay.demonstrations names none"),
        (["algorithm.aggregation=constant"], "algorithm.aggregation"),
        (["algorithm.target_critics=3"], "target_critics = 3"),
    ],
)
def test_settings_without_effect_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_recipe(load_recipe("robot-sac", overrides))


def test_the_report_draws_the_critics_and_the_temperature(whole: Path) -> None:
    write_report([RunFolder.named(whole, "whole")], whole / "report.html")
    page = (whole / "report.html").read_text(encoding="utf-8")
    assert "Off-policy: critic loss" in page and "Off-policy: temperature" in page
