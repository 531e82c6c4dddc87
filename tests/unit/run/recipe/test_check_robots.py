"""A robot's policy that is incompatible with its simulator is refused before work starts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.forecast.recipe_check import AcceptsHere
from interlace.robots.datasets.episodes import RecordedEpisode
from interlace.robots.datasets.lerobot_write import LeRobotWriter
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.memory import sum_by_device
from tests.support.openvla_folder import openvla_folder

DOT = (
    "episode.env.family=tests.support.dot_simulator:Dot",
    "episode.env.settings={tasks: [near, far], horizon: 12}",
    "episode.features=[]",
    "cluster.devices=cpu:1",
    "task.starts.train_size=16",
)


SWITCHES = "episode.env={family: gymnasium, settings: {tasks: ['tests.support.odd_gym:Switches-v0']}}"
CLASSIC = "episode.env={family: gymnasium, settings: {tasks: [CartPole-v1]}}"
CHOICES = ("model.robot.bins=2", "model.robot.low=[-0.5]", "model.robot.high=[1.5]")
CARTPOLE = "episode.env={family: gymnasium, num_envs: 100000000, settings: {tasks: [CartPole-v1]}}"


def robot(state_size: int = 2, action_size: int = 1, chunk: int = 2) -> str:
    sizes = f"state_size: {state_size}, action_size: {action_size}, chunk: {chunk}"
    return f"model.robot={{{sizes}, state_tokens: 1, bins: 8, layers: 1}}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((robot(action_size=3),), r"take actions of 1 numbers, and the policy gives 3.*action_size=1"),
        ((robot(state_size=5),), r"reads state of shape \[5\], and the episode gives \[2\]"),
        ((robot(chunk=13),), r"a chunk has 13 actions, and an episode at most 12"),
        ((robot(), "episode.max_turns=5"), r"max_turns=5 .* horizon of 12 actions in chunks of 2. Set it to 6 or more"),
        (
            (robot(), "actor.context_parallel=2", "cluster.devices=cpu:2"),
            r"reads arrays beside them",
        ),
        (
            (robot(), "model.robot.head=gaussian", "algorithm=prime", "samples_per_prompt=2"),
            r"'prime' trains a process reward model .* model.robot.head=tokens",
        ),
        (
            (robot(), "model.robot.state_tokens=20", "sampling.max_new_tokens=2", "rollout.max_tokens=16"),
            r"has 24 tokens with its observation, and with the 2 tokens .* is 26; .*max_tokens=16 .* to 32 or more",
        ),
        (("model={path: tiny:micro, robot: null}",), r"needs a policy that answers in action tokens"),
        ((robot(), "task.starts.instructions=[' ']"), r"an instruction is empty"),
        ((robot(), "task.starts.instructions=[a, b, c]"), r"instruction 'c' .* is of task 2, .* has 2: near, far"),
        ((robot(), "task.starts.tasks=[7]"), r"is of task 7"),
        ((robot(state_size=1), "episode.features=[{of: [2]}]"), r"place 2 of a state of 2 numbers"),
        ((robot(), "episode.features=[{of: [0], scale: [0]}]"), r"scale = \[0.0\] divides by 0"),
        ((robot(), "model.robot.low=[1]"), r"a range from low = 1 to high = 1 is empty"),
        ((robot(), SWITCHES), r"its actions are MultiDiscrete\(\[2 3\]\); they must be a Box or a Discrete"),
        ((robot(), CARTPOLE), r"100000000 environments of 'gymnasium' .* env.num_envs to"),
        ((robot(), "episode.env.family=tests.unit.robots.envs.blind:Pictured"), r"cannot be drawn"),
        (
            (robot(state_size=4, chunk=1), "model.robot.head=flow", CLASSIC),
            r"an action of 'gymnasium' is one of 2 choices, and the policy's head gives continuous numbers. Set model",
        ),
        (
            (robot(state_size=4, chunk=1), "model.robot.image_size=64", *CHOICES, CLASSIC),
            r"reads the camera 'image', and environments of 'gymnasium' render none .* episode.env.settings.image_size",
        ),
        (
            (robot(), "model.robot.image_size=64"),
            r"reads image of shape \[64, 64, 3\], and the episode gives \[42, 42, 3\]",
        ),
        (
            (robot(), "episode.env.settings={tasks: [near], horizon: 3, instructions: {near: go there}}"),
            r"the policy reads those of its starts or rows. Remove the setting",
        ),
        (
            (robot(), "model.robot.head=flow", "model.robot.flow={steps: 0}"),
            r"model.robot.flow.steps",
        ),
        (
            (robot(), "model.robot.head=flow", "model.robot.flow={min_std: 0.5, max_std: 0.1}"),
            r"min_std = 0.5 is above max_std = 0.1",
        ),
    ],
)
def test_a_policy_that_cannot_serve_is_refused_before_work_starts(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_recipe(load_recipe("robot-cartpole", [*DOT, *settings]))


def test_a_policy_without_statistics_of_its_data_is_refused(tmp_path: Path) -> None:
    openvla_folder(tmp_path / "openvla")
    file = tmp_path / "openvla" / "config.json"
    config = json.loads(file.read_text())
    asked = ("episode.env.settings={tasks: [near], horizon: 3}", f"model={{path: {tmp_path / 'openvla'}}}")

    def ranges(**changed: object) -> dict[str, object]:
        return {"dots": {"action": config["norm_stats"]["dots"]["action"] | changed}}

    for stats, words in (
        ({}, "statistics of no data set. Name one as unnorm_key"),
        ({"a": config["norm_stats"]["dots"], "b": config["norm_stats"]["dots"]}, "statistics of a, b"),
        ({"dots": {"action": {"mask": [True]}}}, r"norm_stats\['dots'\]\['action'\] .* has no q01"),
        (ranges(mask=[True] * 3), r"different sizes \(q01 of 1, q99 of 1, mask of 3 numbers\)"),
        (ranges(q99=[1.0, 2.0]), r"different sizes \(q01 of 1, q99 of 2, mask of 1 numbers\)"),
        (ranges(q01=0.5), r"different sizes \(q01 of 0"),
        (ranges(q01=[float("nan")]), r"no range at number 0: q01 = nan, q99 = 0.75"),
        (ranges(q01=[None]), r"no range at number 0: q01 = None"),
        (ranges(q01=[2.0]), r"no range at number 0: q01 = 2.0, q99 = 0.75"),
    ):
        file.write_text(json.dumps({**config, "norm_stats": stats}))
        with pytest.raises(UserError, match=words):
            check_recipe(load_recipe("robot-cartpole", [*DOT, *asked]))


def test_one_that_can_is_not() -> None:
    assert check_recipe(load_recipe("robot-cartpole", [*DOT, robot()])).num_train_prompts == 16


def test_simulators_that_cannot_save_their_state_are_refused_on_a_device_that_is_too_small_for_all() -> None:
    task = "{tasks: ['tests.support.wrapped_gym:Stacked-v0'], horizon: 12, arguments: {honest: false}}"
    recipe = load_recipe(
        "robot-cartpole",
        [
            *DOT,
            robot(state_size=3),
            "episode.env.family=gymnasium",
            f"episode.env.settings={task}",
            "schedule.placement.env=all",
        ],
    )
    [shared] = sum_by_device(check_recipe(recipe).memory)
    small = replace(shared.device, memory_bytes=shared.together_bytes - 1)
    with pytest.raises(UserError, match=r"Stacked-v0' cannot save its state: .*placement.env=host"):
        check_recipe(recipe, (small,))
    accepts = AcceptsHere(recipe, (small,), check_recipe(recipe).max_prompt_tokens)
    assert "cannot save its state" in (accepts(recipe.schedule.resolved) or "")
    assert accepts(load_recipe("robot-cartpole", DOT).schedule.resolved) is None
    check_recipe(recipe.model_copy(update={"schedule": load_recipe("robot-cartpole", DOT).schedule}), (small,))


def test_updates_are_counted_as_the_algorithm_makes_them() -> None:
    for recipe, changed, updates in (
        ("robot-cartpole", ["epochs=3"], 20 * 4 * 3),
        ("robot-awr", [], 12 * 16 * 8),
        ("robot-dagger", [], 16 * 20),
        ("clone", [], 12 * 20),
    ):
        assert check_recipe(load_recipe(recipe, ["cluster.devices=cpu:1", *changed])).num_updates == updates


def test_demonstrations_that_cannot_be_learned_from_are_refused_before_work_starts(tmp_path: Path) -> None:
    def write(name: str, size: int, *, done: bool) -> Path:
        writer = LeRobotWriter(tmp_path / name, fps=10)
        state, actions = np.zeros((3, 3), np.float32), np.zeros((3, size), np.float32)
        terminated = np.arange(3) == 2 if done else None
        writer.add(
            RecordedEpisode(
                instruction="swing up", observations={"state": state}, actions=actions,
                rewards=np.ones(3, np.float32), terminated=terminated,
            )
        )  # fmt: skip
        writer.finish()
        return tmp_path / name

    def refuse(folder: Path, *settings: str) -> str:
        with pytest.raises(UserError) as caught:
            check_settings(load_recipe("robot-sac", [f"replay.demonstrations={folder}", *settings]))
        return str(caught.value)

    whole = write("whole", 1, done=True)
    assert "has no column 'next.done'" in refuse(write("endless", 1, done=False))
    assert "has no column 'next.success'" in refuse(whole, "episode.reward=success")
    wide = write("wide", 2, done=True)
    assert "actions of 2 numbers" in refuse(wide)
    warmup = f"warmup={{steps: 2, experts: {{episodes: 1, dataset: {wide}}}}}"
    assert "warmup.experts.dataset=" in refuse(whole, warmup)
    assert "turns_per_update=1 has no half" in refuse(whole, "algorithm.turns_per_update=1")
    few = ("replay.capacity=3", "episode.max_turns=200", "algorithm.start_turns=")
    assert "replay.capacity to 4 or more, or algorithm.start_turns to 600 or less" in refuse(
        whole, *few[:2], f"{few[2]}601"
    )
    check_settings(load_recipe("robot-sac", [f"replay.demonstrations={whole}", *few[:2], f"{few[2]}600"]))
    check_settings(load_recipe("robot-sac", [f"replay.demonstrations={whole}"]))
    reach = ["episode.env.settings.reward=dense", "episode.reward=return"]
    four = load_recipe("robot-sac-reach", [f"replay.demonstrations={write('four', 4, done=True)}", *reach])
    with pytest.raises(UserError, match=r"its last action alone. Set light=false"):
        check_settings(four)


@pytest.mark.parametrize(("recipe", "section"), [("robot", "warmup"), ("clone", "replay")])
def test_demonstrations_shorter_than_a_chunk_are_refused(recipe: str, section: str) -> None:
    """The policy imitated chunks whose rest repeated the last action of the demonstration."""
    changed = f"{section}.experts.demonstration_horizon="
    check_recipe(load_recipe(recipe, ["cluster.devices=cpu:1", f"{changed}4"]))
    with pytest.raises(UserError, match=f"{changed}3 ends each demonstration within the first chunk of 4 actions"):
        check_recipe(load_recipe(recipe, ["cluster.devices=cpu:1", f"{changed}3"]))


def test_a_warm_up_of_a_robot_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"warmup.experts is not set.*or warmup=null"):
        check_recipe(load_recipe("robot-cartpole", ["warmup.steps=5"]))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"n_action_bins": 0}, r"n_action_bins=0 .* give 2 or more"),
        ({"picture_origin": "rlinf"}, r"picture_origin = 'rlinf' .* 'openvla', 'processor'"),
        ({"embodiment": "franka"}, r"embodiment 'franka' .* is unknown"),
    ],
)
def test_wrong_settings_of_a_published_policy_are_refused(
    tmp_path: Path, changed: dict[str, object], words: str
) -> None:
    openvla_folder(tmp_path / "openvla")
    file = tmp_path / "openvla" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    asked = ("episode.env.settings={tasks: [near], horizon: 3}", f"model={{path: {tmp_path / 'openvla'}}}")
    with pytest.raises(UserError, match=words):
        check_recipe(load_recipe("robot-cartpole", [*DOT, *asked]))
