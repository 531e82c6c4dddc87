"""Environments of batch simulators are stepped together, and none of them depends on the others."""

import asyncio
import socket
import sys
import threading
from importlib.util import find_spec

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.robots.envs import process
from interlace.robots.envs.batch import BatchSimulator
from interlace.robots.envs.batched_envs import BatchedEnvs
from interlace.robots.envs.load import EnvConfig, create_envs
from interlace.robots.envs.mujoco_tasks import CartpoleBalance, Push
from interlace.robots.envs.pool import EnvPool
from interlace.rollouts.envs.spec import SlotJob, Start
from interlace.runtime.process.child import frame_message
from tests.contract.envs import WalkBatch, WalkBatchSettings

WALK = "tests.contract.envs:WalkBatch"
ENGINES = {"mjx": "mujoco.mjx", "mujoco_warp": "mujoco_warp"}


def is_installed(engine: str) -> bool:
    return find_spec("mujoco") is not None and find_spec(ENGINES[engine]) is not None


def make(family: str, num_envs: int, **settings: object) -> BatchedEnvs:
    if family in ENGINES and not is_installed(family):
        pytest.skip(f"{ENGINES[family]} is not installed: make test-batch-simulators")
    envs = create_envs(family, settings, num_envs)
    assert isinstance(envs, BatchedEnvs)
    return envs


def begin(envs: BatchedEnvs, states: list[int], slots: list[int] | None = None) -> np.ndarray:
    count = len(states)
    return envs.reset(seeds=[0] * count, task_ids=[0] * count, init_state_ids=states, slots=slots)["state"]


class CountedWalks(BatchedEnvs):
    """Walks whose simulator can be asked for its calls."""

    def __init__(self, num_envs: int, **settings: object) -> None:
        self.made: list[WalkBatch] = []
        super().__init__(self.make_walk, WalkBatchSettings.parse({"tasks": ["right"], **settings}), num_envs)  # type: ignore[arg-type]

    def make_walk(self, settings: WalkBatchSettings, task: str, num_envs: int) -> WalkBatch:
        self.made.append(WalkBatch(settings, task, num_envs))
        return self.made[-1]


def test_all_environments_of_a_call_are_stepped_in_one_call_and_observed_once() -> None:
    envs = CountedWalks(4, action_repeat=2)
    begin(envs, [0, 1, 2, 3])
    envs.chunk_step(np.zeros((4, 3, 1)))
    assert envs.made[0].calls == [("reset", 4), ("observe", 4), *[("step", 4)] * 6, ("observe", 4)]
    before = envs.get_state([0, 2])
    envs.chunk_step(np.ones((2, 1, 1)), slots=[3, 1])
    assert envs.made[0].calls[-3:] == [("step", 2), ("step", 2), ("observe", 2)]
    assert envs.get_state([0, 2]) == before
    begin(envs, [5], slots=[1])
    assert envs.made[0].calls[-2:] == [("reset", 1), ("observe", 1)] and envs.get_state([0, 2]) == before


def test_an_environment_that_breaks_ends_its_episode_alone() -> None:
    envs = make(WALK, 2, tasks=["right"], horizon=20, fault="nan", fault_at=1.0)
    begin(envs, [1, 2])
    result = envs.chunk_step([[[1.0]] * 2, [[-1.0]] * 2])
    assert list(result.failures) == [0] and "NaN" in result.failures[0]
    assert result.valid[1].all() and not result.ended[1]
    begin(envs, [3], slots=[0])
    assert not envs.chunk_step([[[0.0]]] * 2).failures


def test_a_call_that_raises_ends_the_episodes_of_the_call() -> None:
    envs = make(WALK, 3, tasks=["right"], horizon=20, fault="raise", fault_at=1.0)
    begin(envs, [1, 2, 3])
    result = envs.chunk_step([[[1.0]] * 2, [[-1.0]] * 2], slots=[0, 1])
    assert {row: "the wheel came off" in reason for row, reason in result.failures.items()} == {0: True, 1: True}
    assert not envs.chunk_step([[[-1.0]]], slots=[2]).failures


def test_stacked_observations_begin_with_the_first_and_contain_each_action() -> None:
    envs = make(WALK, 1, tasks=["right"], horizon=20, frame_stack=3)
    [first] = begin(envs, [1]).reshape(1, 3, 2)
    assert (first == first[0]).all()
    [after] = envs.chunk_step([[[0.5], [0.25]]]).observation["state"].reshape(1, 3, 2)
    np.testing.assert_allclose(after[:, 0] - first[0, 0], [0, 0.5, 0.75], rtol=1e-6)


def test_a_simulator_that_cannot_save_refuses() -> None:
    class Forgetful(WalkBatch):
        save, load = BatchSimulator.save, BatchSimulator.load

    envs = BatchedEnvs(Forgetful, WalkBatchSettings(tasks=("right",)), 1)
    begin(envs, [0])
    for call in (envs.get_state, envs.offload):
        with pytest.raises(UserError, match="cannot save the states of 1 environments"):
            call()
    with pytest.raises(UserError, match="no scripted expert"):
        envs.expert_actions()
    with pytest.raises(UserError, match="draws no pictures"):
        envs.render()


def test_jobs_that_arrive_together_are_one_call() -> None:
    """Resets and chunks of four environments in one message: the process runs all resets, then all chunks."""

    async def run() -> list[object]:
        config = EnvConfig(family=WALK, settings={"tasks": ["left", "right"]}, num_envs=4)
        pool = EnvPool(config)
        try:
            resets = [SlotJob(slot=s, kind="reset", start=Start(task=s % 2, init_state=s)) for s in range(4)]
            chunks = [SlotJob(slot=s, kind="chunk", actions=np.zeros((2, 1), np.float32)) for s in range(4)]
            return [answer.value for answer in (await pool.run_jobs([*resets, *chunks])).answers]
        finally:
            pool.close()

    found = asyncio.run(run())
    for slot in range(4):
        place, goal = found[slot]["state"]
        assert goal == (3 if slot % 2 else -3)
        np.testing.assert_allclose(found[4 + slot].reward, -abs(goal - place), rtol=1e-6)


def test_a_process_waits_for_the_running_environments_and_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    jobs = [SlotJob(slot=slot, kind="chunk") for slot in range(2)]
    ours.sendall(frame_message(0, jobs[0]))
    monkeypatch.setattr(process, "GATHER_S", 0.0)
    assert [number for number, _ in process.receive_jobs(theirs, {0, 1})] == [0]
    monkeypatch.setattr(process, "GATHER_S", 60.0)
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append([n for n, _ in process.receive_jobs(theirs, {0, 1})]))
    ours.sendall(frame_message(1, jobs[0]))
    thread.start()
    ours.sendall(frame_message(2, jobs[1]))
    thread.join(30)
    assert found == [[1, 2]]
    ours.sendall(frame_message(3, jobs[0]))
    assert [number for number, _ in process.receive_jobs(theirs, {0})] == [3]  # no other episode runs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_mistakes_are_refused(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_installed(engine):
        with pytest.raises(UserError, match="Did you mean 'cartpole-balance'"):
            make(engine, 1, tasks=["cartpole-balanse"])
        with pytest.raises(UserError, match="changes the camera"):
            make(engine, 1, tasks=["push@near"], cameras={"near": {"shift": [0.1, 0, 0]}})
        with pytest.raises(UserError, match=r"device='cuda'"):
            make(engine, 1, device="cuda")
        envs = make(engine, 1, camera="top")
        begin(envs, [0])
        with pytest.raises(UserError, match=r"no camera 'top'.*side"):
            envs.render()
    monkeypatch.setitem(sys.modules, {"mjx": "jax", "mujoco_warp": "warp"}[engine], None)
    with pytest.raises(UserError, match=rf"interlace\[{'mjx' if engine == 'mjx' else 'warp'}\]"):
        create_envs(engine, {}, 1)


@pytest.mark.parametrize(
    ("engine", "task"),
    [
        ("mjx", "cartpole-swingup"),
        ("mjx", "tests.support.mocap_task:Towed"),
        ("mujoco_warp", "push"),
        ("mujoco_warp", "tests.support.mocap_task:Towed"),
    ],
)
def test_an_episode_is_the_same_alone_in_a_batch_and_after_its_state_was_saved(engine: str, task: str) -> None:
    """To the bit, whatever the place in the batch; with another number of environments to 1e-5."""
    settings = {"tasks": [task], "horizon": 50, "frame_stack": 2}
    random = np.random.default_rng(0)
    envs = make(engine, 3, **settings)
    chunks = random.uniform(-1, 1, (4, 3, 3, envs.spec.action.size)).astype(np.float32)
    begin(envs, [7, 8, 9])
    expected = [envs.chunk_step(chunk) for chunk in chunks]
    begin(envs, [9, 7], slots=[0, 2])
    own = chunks[:, [2, 1, 0]]
    first = envs.chunk_step(own[0][[2]], slots=[2])
    np.testing.assert_array_equal(first.observation["state"][0], expected[0].observation["state"][0])
    [state] = envs.get_state([2])
    envs.set_state([state], slots=[1])  # in another place
    for number in range(1, 4):
        again = envs.chunk_step(own[number][[2, 2]], slots=[2, 1])
        for row in range(2):
            np.testing.assert_array_equal(again.observation["state"][row], expected[number].observation["state"][0])
            np.testing.assert_array_equal(again.reward[row], expected[number].reward[0])
    envs.close()
    alone = make(engine, 1, **settings)
    begin(alone, [7])
    for number in range(4):
        result = alone.chunk_step(chunks[number][[0]])
        np.testing.assert_allclose(result.observation["state"][0], expected[number].observation["state"][0], atol=1e-5)
    alone.close()


@pytest.mark.parametrize(("engine", "kind"), [("mjx", CartpoleBalance), ("mujoco_warp", Push)])
def test_the_physics_is_mujocos(engine: str, kind: type[CartpoleBalance | Push]) -> None:
    """Against MuJoCo's own step from the same start, with the same actions; contacts included."""
    envs = make(engine, 2, tasks=["cartpole-balance" if kind is CartpoleBalance else "push"], horizon=50)
    import mujoco

    begin(envs, [1, 2])
    simulator = envs._runners[0].simulator
    model = mujoco.MjModel.from_xml_string(kind.mjcf)
    data = mujoco.MjData(model)
    mujoco.mj_setState(model, data, simulator.read_states()[1].astype(np.float64), simulator.state_parts)
    actions = np.random.default_rng(0).uniform(-1, 1, (10, model.nu))
    for action in actions:
        data.ctrl[:] = action
        for _ in range(kind.num_substeps):
            mujoco.mj_step(model, data)
    envs.chunk_step(np.stack([actions, actions]))
    found = mujoco.MjData(model)
    mujoco.mj_setState(model, found, simulator.read_states()[1].astype(np.float64), simulator.state_parts)
    np.testing.assert_allclose(found.qpos, data.qpos, atol=1e-3)
    envs.close()


def test_warp_s_pusher_pushes_the_box_to_the_goal() -> None:
    """By a rule that goes behind the box, then through it: the contacts of pusher, box and floor do the rest."""
    envs = make("mujoco_warp", 4, tasks=["push"], horizon=100)
    observed = begin(envs, [0, 1, 2, 3])
    for _ in range(25):
        pusher, box = observed[:, :2], observed[:, 2:4]
        way = Push.goal - box
        way /= np.linalg.norm(way, axis=1, keepdims=True)
        along = ((box - pusher) * way).sum(1, keepdims=True)
        beside = np.linalg.norm(box - along * way - pusher, axis=1, keepdims=True)
        target = np.where((beside < 0.025) & (along > 0.05), box, box - 0.11 * way)
        force = 25 * (target - pusher) - 2 * observed[:, 7:9]
        result = envs.chunk_step(np.repeat(force[:, None], 2, axis=1))
        observed = result.observation["state"]
    assert result.success.all() and not result.failures
    envs.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_tensors_stay_on_the_device_and_torch_shares_them(engine: str) -> None:
    import torch

    envs = make(engine, 2, tasks=["cartpole-balance"])
    begin(envs, [1, 2])
    simulator = envs._runners[0].simulator
    found = simulator.observe(simulator.to_device(np.ones(2, np.bool_)))["state"]
    shared = torch.from_dlpack(found)
    np.testing.assert_array_equal(shared.numpy(), envs.observe()["state"])
    assert shared.data_ptr() == torch.from_dlpack(found).data_ptr()
    envs.close()
