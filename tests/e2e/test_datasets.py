"""Demonstrations that the recorder wrote are imitated by a warm-up, and fill half of the batches of SAC (RLPD)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.core.errors import UserError
from interlace.core.transitions import TransitionBatch
from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.robots.datasets.lerobot_read import LeRobotReader
from interlace.robots.datasets.lerobot_write import LeRobotWriter
from interlace.run.recipe.config import algorithm_of
from interlace.run.recipe.load import load_recipe
from interlace.run.replay import open_learning, read_demonstrations
from tests.support.robots import DOT, SMALL
from tests.support.training import equal_weights, final_weights, metrics, run_recipe

pytest.importorskip("gymnasium")
pytest.importorskip("pyarrow.parquet")
ONE_TASK = (
    *SMALL,
    *DOT,
    "episode.env.settings={tasks: [near], horizon: 12}",
    "task.starts={instructions: [push the puck down], train_size: 64, heldout_size: 0}",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "demos"
    arguments = ["record", "robot-cartpole", str(folder), *ONE_TASK, "--episodes", "6", "--noise", "0.3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "6 episodes" in result.output and "6 successes" in result.output
    return folder


def test_the_recorder_writes_what_the_expert_did(recorded: Path) -> None:
    episodes = [*LeRobotReader(recorded).episodes(cameras=["image"])]
    assert [each.instruction for each in episodes] == ["push the puck down"] * 6
    for each in episodes:
        assert each.observations["state"].shape == (len(each), 2)
        assert each.observations["image"].shape == (len(each), 42, 42, 3)
        assert each.terminated is not None and each.terminated.tolist() == [False] * (len(each) - 1) + [True]
        assert each.shown is not None and not np.array_equal(each.shown, each.actions), "noise is not imitated"
        moved = each.observations["state"][1:, 0] - each.observations["state"][:-1, 0]
        np.testing.assert_allclose(moved, 0.2 * each.actions[:-1, 0], atol=1e-6)
        assert np.abs(each.actions).max() <= 1, "the executed actions are within the simulator's bounds"


def test_each_instruction_of_a_task_is_demonstrated(tmp_path: Path) -> None:
    texts = ["push the puck down", "move the disc to the left"]
    starts = f"task.starts={{instructions: {texts}, tasks: [0, 0], train_size: 64, heldout_size: 0}}"
    settings = [*ONE_TASK, starts, f"model.cache_dir={tmp_path}", "warmup={steps: 2, experts: {episodes: 2}}"]
    result = CliRunner().invoke(
        app, ["record", "robot-cartpole", str(tmp_path / "demos"), *settings, "--episodes", "2"]
    )
    assert result.exit_code == 0, result.output
    found = [each.instruction for each in LeRobotReader(tmp_path / "demos").episodes()]
    assert found == [text for text in texts for _ in range(2)]
    assert run_recipe("robot-cartpole", tmp_path, "both", settings).done_steps == 2


def test_a_data_set_has_instructions_without_the_prompts_template(recorded: Path, tmp_path: Path) -> None:
    template = 'task.format.template="In: {prompt}?"'
    settings = [*ONE_TASK, template, f"model.cache_dir={tmp_path}"]
    result = CliRunner().invoke(
        app, ["record", "robot-cartpole", str(tmp_path / "demos"), *settings, "--episodes", "1"]
    )
    assert result.exit_code == 0, result.output
    assert [each.instruction for each in LeRobotReader(tmp_path / "demos").episodes()] == ["push the puck down"]
    warmup = f"warmup={{steps: 2, experts: {{episodes: 2, dataset: {recorded}}}}}"
    assert run_recipe("robot-cartpole", tmp_path, "asked", [*settings, warmup, "steps=1"]).done_steps == 1


def test_a_warm_up_imitates_the_data_set_as_it_imitates_the_expert(recorded: Path, tmp_path: Path) -> None:
    live = "warmup={steps: 20, batch_size: 8, optimizer: {lr: 3.0e-3}, experts: {episodes: 6, noise: [0.3]}}"
    read = live.replace("noise: [0.3]", f"dataset: {recorded}")
    for name, warmup in (("live", live), ("read", read)):
        settings = [*ONE_TASK, warmup, "steps=1", f"model.cache_dir={tmp_path / name}"]
        run_recipe("robot-cartpole", tmp_path, name, settings)
    assert equal_weights(final_weights(tmp_path, "read"), final_weights(tmp_path, "live"))


SAC = (
    *ONE_TASK,
    "warmup=null",
    "model.robot.head=squashed",
    "algorithm={name: sac, turns_per_update: 16, start_turns: 8, critic_width: 32, layer_norm: true, gamma: 0.9}",
    "replay={learner: actor_critic}",
    "minibatches=1",
    "samples_per_prompt=1",
)


def test_half_of_each_batch_of_rlpd_is_demonstrated(recorded: Path, tmp_path: Path) -> None:
    settings = [*SAC, f"replay.demonstrations={recorded}", f"model.cache_dir={tmp_path}"]
    recipe = load_recipe("robot-cartpole", settings)
    shown = read_demonstrations(recipe, algorithm_of(recipe).settings)
    steps = sum(len(each) for each in LeRobotReader(recorded).episodes())
    assert len(shown) == sum(
        len(range(offset, len(each), 2)) for each in LeRobotReader(recorded).episodes() for offset in range(2)
    )
    assert len(shown) == steps and shown.actions.shape == (steps, 2) and shown.rewards.max() == 1
    ends = sum(min(2, len(each)) for each in LeRobotReader(recorded).episodes())
    assert (shown.discounts == 0).sum() == ends, "each offset of each episode ends the task"
    run_recipe("robot-cartpole", tmp_path, "rlpd", settings)
    run_recipe("robot-cartpole", tmp_path, "sac", [*SAC, f"model.cache_dir={tmp_path}"])
    with_shown, without = metrics(tmp_path, "rlpd")[-1], metrics(tmp_path, "sac")[-1]
    assert with_shown["off_policy/target"] > without["off_policy/target"], "half of the batch succeeds"


def test_demonstrations_of_other_tasks_are_not_drawn(recorded: Path, tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "two", fps=10)
    for each in LeRobotReader(recorded).episodes():
        writer.add(each)
        writer.add(replace(each, instruction="pull it"))
    writer.finish()

    def read(folder: Path, *settings: str) -> TransitionBatch:
        recipe = load_recipe("robot-cartpole", [*SAC, f"replay.demonstrations={folder}", *settings])
        return read_demonstrations(recipe, algorithm_of(recipe).settings)

    alone = read(recorded)
    np.testing.assert_array_equal(read(tmp_path / "two").actions, alone.actions)
    lift = "task.starts.instructions=[lift it]"
    assert len(read(recorded, lift)) == len(alone), "a single instruction may have another text"
    with pytest.raises(UserError, match="none of the instruction 'lift it'; its instructions are 'pull it', 'push"):
        read(tmp_path / "two", lift)


def test_iql_learns_offline_before_the_first_step_and_resumes(recorded: Path, tmp_path: Path) -> None:
    learner = "algorithm={name: iql, offline_updates: 200, turns_per_update: 32, start_turns: 8, critic_width: 32}"
    settings = [
        *SAC, "model.robot.head=gaussian", learner, f"replay.demonstrations={recorded}", "optimizer.lr=3e-3",
        "task.starts.heldout_size=16",
        f"model.cache_dir={tmp_path}",
    ]  # fmt: skip
    report = run_recipe("robot-cartpole", tmp_path, "whole", settings)
    assert report.before is not None and report.before.greedy_accuracy > 0.5, "the first evaluation follows"
    run_recipe("robot-cartpole", tmp_path, "stopped", settings, stop_after=1)
    assert run_recipe("robot-cartpole", tmp_path, "stopped", settings, resume=True).done_steps == 2
    assert equal_weights(final_weights(tmp_path, "stopped"), final_weights(tmp_path, "whole"))


@pytest.mark.parametrize("algorithm", ["iql", "awr"])
def test_recorded_actions_are_imitated_as_the_simulator_executed_them(algorithm: str, tmp_path: Path) -> None:
    observed = Segment(token_ids=np.array([9], np.int32), sampled=np.zeros(1, np.bool_), inputs={"state": np.ones(2)})
    numbers = np.array([-3.0, 1.5], np.float32)
    answer = Segment(parent=0, token_ids=numbers.view(np.int32))
    prompt = Prompt(uid="a", token_ids=np.array([5], np.int32), text="push the puck down", answer="")
    sample = Sample(key=SampleKey(0, 0), prompt=prompt, segments=(observed, answer), reward=1.0)
    groups: Any = None  # no world model
    for end in (0.5, 1.0):  # of the policy's range; the simulator's ends at 1
        ranges = [f"model.robot.low=[{-end}]", f"model.robot.high=[{end}]", "model.robot.head=gaussian"]
        recipe = load_recipe("robot-cartpole", [*SAC, *ranges, f"algorithm={{name: {algorithm}}}"])
        learning = open_learning(recipe, tmp_path / str(end), None, groups)
        assert learning is not None and learning.off_policy is not None
        [found] = learning.off_policy.convert(sample).actions
        assert (end * found).tolist() == np.clip(end * numbers, -1, 1).tolist()


def test_a_data_set_that_does_not_fit_is_refused(recorded: Path, tmp_path: Path) -> None:
    wider = ["model.robot.action_size=2", "model.robot.low=[]", "model.robot.high=[]"]
    recipe = load_recipe("robot-cartpole", [*SAC, *wider, f"replay.demonstrations={recorded}"])
    with pytest.raises(UserError, match="actions of 1 numbers"):
        read_demonstrations(recipe, algorithm_of(recipe).settings)
    narrower = ["model.robot.low=[-0.5]", "model.robot.high=[0.5]", f"replay.demonstrations={recorded}"]
    recipe = load_recipe("robot-cartpole", [*SAC, *narrower])
    with pytest.raises(UserError, match=r"model.robot.low=\[-1.0\] and model.robot.high=\[1.0\]"):
        read_demonstrations(recipe, algorithm_of(recipe).settings)
    with pytest.raises(UserError, match="not a LeRobotDataset"):
        run_recipe("robot-cartpole", tmp_path, "none", [*SAC, f"replay.demonstrations={tmp_path}"])
    with pytest.raises(UserError, match="actor_critic alone"):
        load_recipe("robot-cartpole", [*ONE_TASK, f"replay={{demonstrations: {recorded}}}"])
    warmup = f"warmup={{steps: 2, experts: {{episodes: 2, dataset: {recorded}}}}}"
    starts = "task.starts.instructions=[pull it]"
    with pytest.raises(UserError, match="no episode of the instruction 'pull it'"):
        run_recipe("robot-cartpole", tmp_path, "other", [*ONE_TASK, warmup, starts, f"model.cache_dir={tmp_path}"])
    longer = tmp_path / "longer"
    writer = LeRobotWriter(longer, fps=10)
    first = next(LeRobotReader(recorded).episodes())
    writer.add(replace(first, observations={"state": np.repeat(first.observations["state"], 2, 1)}))
    writer.finish()
    other = [warmup.replace(str(recorded), str(longer)), f"model.cache_dir={tmp_path}"]
    for name, settings in (("rlpd", [*SAC, f"replay.demonstrations={longer}"]), ("imitates", [*ONE_TASK, *other])):
        with pytest.raises(UserError, match=r"'state' of shape \[4\], and the simulators of the recipe give \[2\]"):
            run_recipe("robot-cartpole", tmp_path, name, [*settings, f"model.cache_dir={tmp_path}"])
    image = ["model.robot.state_size=0", "model.robot.image_size=42"]
    blind = tmp_path / "blind"
    writer = LeRobotWriter(blind, fps=10)
    writer.add(next(LeRobotReader(recorded).episodes()))  # without its pictures
    writer.finish()
    sees = [*ONE_TASK, *image, warmup.replace(str(recorded), str(blind)), f"model.cache_dir={tmp_path}"]
    with pytest.raises(UserError, match=r"the policy needs 1 numbers and the arrays \['image'\]"):
        run_recipe("robot-cartpole", tmp_path, "sees", sees)


def test_options_that_do_not_fit_the_simulator_are_refused_before_an_episode(tmp_path: Path) -> None:
    def refuse(settings: Sequence[str], *options: str) -> str:
        result = CliRunner().invoke(app, ["record", "robot-cartpole", str(tmp_path / "demos"), *settings, *options])
        assert result.exit_code == 2 and not (tmp_path / "demos").exists()
        return result.stderr

    assert "has 2 numbers, and an action has 1" in refuse(ONE_TASK, "--noise", "0.3", "--noise", "0.1")
    assert "noise" in (told := refuse(ONE_TASK, "--noise", "-0.3")) and "0 or more" in told
    assert "fps=inf: the rate must be a finite number" in refuse(ONE_TASK, "--fps", "inf")
    odd = "episode.env.family=tests.support.dot_simulator:OddDot"
    assert "these are 42 x 43" in refuse([*ONE_TASK, odd], "--video")


def test_a_recorded_data_set_is_replaced_and_no_other_folder(tmp_path: Path) -> None:
    folder = tmp_path / "demos"
    command = ["record", "robot-cartpole", str(folder), *ONE_TASK, "--episodes"]

    def refuse(*options: str) -> str:
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 2
        return " ".join(result.stderr.split())

    folder.mkdir()
    assert CliRunner().invoke(app, [*command, "2", "--overwrite"]).exit_code == 0, "an empty folder may be replaced"
    assert "contains a data set already. Replace it (--overwrite)" in refuse("1")
    assert "has 2 numbers" in refuse("1", "--overwrite", "--noise", "0.3", "--noise", "0.1")
    assert len(LeRobotReader(folder)) == 2, "a refused command deletes nothing"
    assert CliRunner().invoke(app, [*command, "1", "--overwrite"]).exit_code == 0
    assert len(LeRobotReader(folder)) == 1
    (folder / "notes.txt").write_text("mine")
    assert "not a recorded data set (it contains 'notes.txt'), so it is not overwritten" in refuse("1", "--overwrite")
    (folder / "notes.txt").unlink()
    (folder / "meta/info.json").unlink()
    assert "(it has no meta/info.json)" in refuse("1", "--overwrite")
    (tmp_path / "link").symlink_to(folder)
    command[2] = str(tmp_path / "link")
    assert "is a symbolic link" in refuse("1", "--overwrite")
