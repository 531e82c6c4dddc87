"""Tasks and states of MetaWorld's protocols, and cameras that an evaluation moves."""

from types import SimpleNamespace

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.robots.envs.camera_change import CameraChange, change_camera
from interlace.robots.envs.load import create_envs
from interlace.robots.envs.metaworld import BENCHMARKS, NUM_GOALS, MetaWorldSettings
from interlace.run.recipe.load import load_recipe

DOT_FAMILY = "tests.support.dot_simulator:Dot"


def test_the_tasks_of_the_protocols_are_the_library_s() -> None:
    kinds = pytest.importorskip("metaworld.env_dict")
    assert BENCHMARKS["MT10"] == tuple(kinds.MT10_V3)
    assert BENCHMARKS["ML10"] == (*kinds.ML10_V3["train"], *kinds.ML10_V3["test"])
    assert MetaWorldSettings.parse({"benchmark": "ML10"}).tasks == BENCHMARKS["ML10"]
    assert MetaWorldSettings.parse({"benchmark": "ML10", "tasks": ["reach-v3"]}).tasks == ("reach-v3",)


@pytest.mark.parametrize("benchmark", [None, "MT10", "ML10"])
def test_a_protocol_has_fifty_states_and_ml_hides_the_goal(benchmark: str | None) -> None:
    pytest.importorskip("metaworld")
    envs = create_envs("metaworld", {"tasks": ["reach-v3"], "horizon": 20, "benchmark": benchmark}, 2)

    def states(*numbers: int) -> np.ndarray:
        found = envs.reset(seeds=[0, 0], task_ids=[0, 0], init_state_ids=numbers)["state"]
        return np.asarray(envs.chunk_step(np.zeros((2, 2, 4), np.float32)).observation["state"]) + 0 * found

    first, again = states(3, 3 + 7 * NUM_GOALS)
    other, _ = states(4, 4)
    assert (first == again).all() == (benchmark is not None) and not np.array_equal(first, other)
    assert (first[36:39] == 0).all() == (benchmark == "ML10")
    envs.close()


@pytest.mark.parametrize("recipe", ["metaworld-mt10", "metaworld-ml10"])
def test_a_success_returns_more_than_standing_still(recipe: str) -> None:
    pytest.importorskip("metaworld")
    settings = load_recipe(recipe, []).episode.env.settings
    envs, returns = create_envs("metaworld", {**settings, "tasks": ["reach-v3"]}, 1), []
    for is_expert in (True, False):
        envs.reset(seeds=[0], task_ids=[0], init_state_ids=[1])
        total, ended = 0.0, False
        while not ended:
            chunk = envs.expert_actions() if is_expert else np.zeros((1, 10, 4), np.float32)
            result = envs.chunk_step(chunk)
            total, ended = total + float(result.reward.sum()), bool(result.ended[0])
        returns.append(total)
        assert result.success[0] == is_expert
    envs.close()
    assert returns[0] > 2 * returns[1]


def test_the_expert_reads_a_hidden_goal() -> None:
    pytest.importorskip("metaworld")
    found = []
    for benchmark in ("MT10", "ML10"):
        envs = create_envs("metaworld", {"tasks": ["reach-v3"], "benchmark": benchmark}, 1)
        envs.reset(seeds=[0], task_ids=[0], init_state_ids=[3])
        found.append(envs.expert_actions(count=3))
        envs.close()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("task", ["pick-place-v3", "sweep-v3", "door-lock-v3"])
def test_rewards_do_not_depend_on_other_environments(task: str) -> None:
    pytest.importorskip("metaworld")
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 1, 5, 4))
    found = []
    for num_envs in (1, 2):
        envs = create_envs("metaworld", {"tasks": [task], "horizon": 50}, num_envs)
        envs.reset(seeds=[0] * num_envs, task_ids=[0] * num_envs, init_state_ids=range(num_envs))
        found.append([])
        for chunk in actions:
            for slot in reversed(range(num_envs)):
                result = envs.chunk_step(chunk, slots=[slot])
            found[-1].append(result.reward[0])
        [state] = envs.get_state([0])
        fresh = create_envs("metaworld", {"tasks": [task], "horizon": 50}, 1)
        fresh.set_state([state])  # as in another process
        found[-1].append(fresh.chunk_step(actions[0]).reward[0])
        for each in (envs, fresh):
            each.close()
    np.testing.assert_array_equal(found[0], found[1])
    again = create_envs("metaworld", {"tasks": [task], "horizon": 50}, 1)
    again.reset(seeds=[0], task_ids=[0], init_state_ids=[0])
    np.testing.assert_array_equal([again.chunk_step(chunk).reward[0] for chunk in [*actions, actions[0]]], found[0])
    again.close()


def test_a_camera_moves_and_turns_about_its_own_axes() -> None:
    # Looks along world y: its axes are right = x, up = z, backwards = -y.
    turned = np.array([np.cos(np.pi / 4), np.sin(np.pi / 4), 0, 0])
    model = SimpleNamespace(cam_pos=np.zeros((2, 3)), cam_quat=np.stack([turned, turned]))
    change_camera(model, 1, CameraChange(shift=(0.1, 0, -0.2), turn=(0, 90, 0)))
    assert model.cam_pos.tolist() == [[0, 0, 0], [0.1, 0, -0.2]] and np.array_equal(model.cam_quat[0], turned)
    w, x, y, z = model.cam_quat[1]
    backwards = [2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)]
    assert backwards == pytest.approx([1, 0, 0]), "panned to the left by 90 degrees, about the upward axis"


MOVED = {"tasks": ["reach-v3", "reach-v3@moved"], "cameras": {"moved": {"shift": [0.1, 0, 0.05], "turn": [0, 4, 0]}}}


@pytest.mark.filterwarnings("ignore::glfw.GLFWError")
def test_a_changed_camera_sees_the_same_states_differently() -> None:
    pytest.importorskip("metaworld")
    try:
        envs = create_envs("metaworld", {**MOVED, "horizon": 20, "image_size": 48}, 2)
    except UserError as error:
        pytest.skip(f"nothing here draws: {error}")
    found = envs.reset(seeds=[0, 0], task_ids=[0, 1], init_state_ids=[1, 1])
    np.testing.assert_array_equal(found["state"][0], found["state"][1])
    difference = np.abs(found["image"][0].astype(int) - found["image"][1])
    assert difference.mean() > 3
    after = envs.chunk_step(np.ones((2, 4, 4), np.float32)).observation
    np.testing.assert_array_equal(after["state"][0], after["state"][1])
    assert envs.spec.tasks == ("reach-v3", "reach-v3@moved") and len(set(envs.spec.instructions)) == 1
    envs.close()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("metaworld", {**MOVED, "cameras": {}}, "changed camera 'moved', and cameras has"),
        ("metaworld", {**MOVED, "cameras": {"moved": {}}}, "cameras.moved moves nothing"),
        (
            "metaworld",
            {"tasks": ["reach-v3"], "cameras": {"moved": {"shift": [0.1, 0, 0]}}},
            "cameras.moved has no effect: no task is seen by it. Add TASK@moved to tasks",
        ),
        ("metaworld", MOVED, "the policy reads no pictures"),
        (DOT_FAMILY, {**MOVED, "tasks": ["near@moved"]}, "have none that moves"),
    ],
)
def test_a_camera_without_effect_is_refused(family: str, settings: dict[str, object], message: str) -> None:
    if family == "metaworld":
        pytest.importorskip("metaworld")
    with pytest.raises(UserError, match=message):
        create_envs(family, settings, 1)
