"""Mistakes of a user about environments, and failures inside them, are reported."""

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.robots.envs import load
from interlace.robots.envs.load import EnvConfig, check_memory, create_envs
from interlace.rollouts.envs.spec import SimulatorError

WALK = "tests.contract.envs:Walk"


def walkers(num_envs: int = 2, **settings: object):
    return create_envs(WALK, {"tasks": ["right"], "horizon": 20, **settings}, num_envs)


def test_families_are_found_by_name() -> None:
    assert walkers().spec.instructions == ("go right",)
    assert walkers(instructions={"right": "walk on"}).spec.instructions == ("walk on",)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("metawrold", {}, "Did you mean 'metaworld'"),
        (WALK, {"tasks": ["left"], "horizn": 3}, "Did you mean 'horizon'"),
        (WALK, {"tasks": ["left", "left"]}, "names a task twice"),
        (WALK, {"tasks": ["left"], "instructions": {"up": "go up"}}, "none of tasks"),
        ("tests.contract.envs:Family", {}, "not a subclass of Simulator"),
    ],
)
def test_settings_that_cannot_work_are_named(family: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_envs(family, settings, 2)


def test_an_unknown_task_names_the_nearest() -> None:
    pytest.importorskip("metaworld")
    with pytest.raises(UserError, match="Did you mean 'reach-v3'"):
        create_envs("metaworld", {"tasks": ["reech-v3"]}, 1)
    with pytest.raises(UserError, match="gymnasium cannot make 'CartPole-v9'"):
        create_envs("gymnasium", {"tasks": ["CartPole-v9"]}, 1)
    with pytest.raises(UserError, match="differ in the shape"):
        create_envs("gymnasium", {"tasks": ["CartPole-v1", "Pendulum-v1"]}, 1)


def test_a_library_that_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "metaworld", None)
    with pytest.raises(UserError, match=r"interlace\[robots\]"):
        create_envs("metaworld", {}, 1)


def test_more_environments_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.contract.envs import Walk

    monkeypatch.setattr(Walk, "memory_bytes", 100 << 20)
    monkeypatch.setattr(load, "available_bytes", lambda: 450 << 20)
    with pytest.raises(UserError, match=r"set env.num_envs to 4 or less"):
        create_envs(WALK, {"tasks": ["left"]}, 5)
    monkeypatch.setattr(Walk, "swaps", True)  # then each process has one a task
    create_envs(WALK, {"tasks": ["left"]}, 5).close()
    with pytest.raises(UserError, match=r"64 environments .* in 3 processes .* set env.workers to 2 or less"):
        check_memory(EnvConfig(family=WALK, settings={"tasks": ["left", "right"]}, num_envs=64, workers=3))


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.contract.envs import Walk

    read: list[object] = []

    class Counted(Walk.Settings):
        def model_post_init(self, context: object) -> None:
            super().model_post_init(context)
            read.append(self)

    monkeypatch.setattr(Walk, "Settings", Counted)
    monkeypatch.setattr(Walk, "memory_bytes", 100 << 20)
    monkeypatch.setattr(load, "available_bytes", lambda: 450 << 20)
    with pytest.raises(UserError, match=r"set env.num_envs to 4 or less"):
        check_memory(EnvConfig(family=WALK, settings={"tasks": ["left"]}, num_envs=5))
    assert len(read) == 1
    create_envs(WALK, {"tasks": ["left"]}, 4).close()
    assert len(read) == 2


def test_a_chunk_before_the_reset_is_refused() -> None:
    with pytest.raises(UserError, match="not reset"):
        walkers().chunk_step([[[1.0]]], slots=[0])


@pytest.mark.parametrize(("fault", "reason"), [("raise", "the wheel came off"), ("nan", "NaN")])
def test_a_simulator_that_breaks_ends_its_episode_alone(fault: str, reason: str) -> None:
    envs = walkers(fault=fault, fault_at=1.0)
    envs.reset(seeds=[0, 0], task_ids=[0, 0], init_state_ids=[1, 2])
    result = envs.chunk_step([[[1.0]] * 2, [[-1.0]] * 2])
    assert list(result.failures) == [0] and reason in result.failures[0]
    assert result.valid[1].all() and not result.ended[1]
    assert 0 in envs.chunk_step([[[1.0]] * 2], slots=[0]).failures
    envs.reset(seeds=[0], task_ids=[0], init_state_ids=[3], slots=[0])
    assert not envs.chunk_step([[[-1.0]] * 2], slots=[0]).failures


def test_a_reset_that_breaks_says_so() -> None:
    from tests.contract.envs import Walk

    class NoStart(Walk):
        def reset(self, init_state: int, seed: int) -> None:
            raise OSError("no such scene")

    from interlace.robots.envs.stepping import SimulatedEnvs

    envs = SimulatedEnvs(NoStart, NoStart.Settings(tasks=("left",)), 1)
    with pytest.raises(SimulatorError, match="no such scene"):
        envs.reset(seeds=[0], task_ids=[0], init_state_ids=[0])


def test_a_reset_that_breaks_changes_no_other_environment() -> None:
    from interlace.robots.envs.stepping import SimulatedEnvs
    from tests.contract.envs import Walk

    class Shared(Walk):
        swaps = True

        def reset(self, init_state: int, seed: int) -> None:
            super().reset(init_state, seed)
            if init_state == 9:
                self.place = 50.0
                raise OSError("no such scene")

    envs = SimulatedEnvs(Shared, Shared.Settings(tasks=("left",)), 2)
    before = envs.reset(seeds=[0], task_ids=[0], init_state_ids=[1], slots=[0])
    with pytest.raises(SimulatorError, match="no such scene"):
        envs.reset(seeds=[0], task_ids=[0], init_state_ids=[9], slots=[1])
    after = envs.chunk_step([[[0.1]]], slots=[0]).observation
    assert abs(after["state"][0, 0] - before["state"][0, 0]) < 1


def test_a_chunk_for_an_environment_without_an_episode_steps_no_other() -> None:
    envs = walkers()
    before = envs.reset(seeds=[0], task_ids=[0], init_state_ids=[0], slots=[0])
    with pytest.raises(UserError, match="environment 1 was not reset before its first chunk"):
        envs.chunk_step(np.ones((2, 1, 1), np.float32))
    np.testing.assert_array_equal(envs.observe([0])["state"], before["state"])
