"""The contract of an environment family, tested for every family."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.robots.envs.base import VectorEnv
from interlace.rollouts.envs.spec import Observation
from tests.contract.envs import FAMILIES, Family

N, K = 4, 5


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: f"{family.name}-{family.settings['tasks']}")
def family(request: pytest.FixtureRequest) -> Family:
    if request.param.library:
        pytest.importorskip(request.param.library)
    if request.param.name == "maniskill":
        try:
            request.param.make(1).close()
        except UserError as error:
            pytest.skip(str(error))
    return request.param


@pytest.fixture(scope="module")
def shared(family: Family) -> Iterator[VectorEnv]:
    envs = family.make(N)
    yield envs
    envs.close()


@pytest.fixture
def envs(shared: VectorEnv) -> VectorEnv:
    begin(shared, range(N))
    return shared


def begin(envs: VectorEnv, states: Sequence[int], slots: Sequence[int] | None = None, seed: int = 0) -> Observation:
    tasks = [state % len(envs.spec.tasks) for state in states]
    return envs.reset(seeds=[seed] * len(states), task_ids=tasks, init_state_ids=states, slots=slots)


def actions(envs: VectorEnv, n: int, k: int = K, seed: int = 0) -> np.ndarray:
    random, spec = np.random.default_rng(seed), envs.spec.action
    if spec.num_choices:
        return random.integers(spec.num_choices, size=(n, k, 1))
    return random.uniform(spec.low, spec.high, (n, k, spec.size)).astype(np.float32)


def same(one: Observation, other: Observation, tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=tolerance, err_msg=name)


def test_arrays_are_as_the_spec_says(envs: VectorEnv) -> None:
    spec = envs.spec
    first = begin(envs, range(N))
    assert {name: (array.shape, str(array.dtype)) for name, array in first.items()} == {
        name: ((N, *one.shape), one.dtype) for name, one in spec.observation.items()
    }
    result = envs.chunk_step(actions(envs, N))
    assert result.observation.keys() == spec.observation.keys()
    assert result.reward.shape == (N, K) and result.reward.dtype == np.float32
    for flags in (result.terminated, result.truncated, result.valid):
        assert flags.shape == (N, K) and flags.dtype == np.bool_
    assert result.success.shape == (N,) and not result.failures
    assert len(spec.instructions) == len(spec.tasks)


def test_the_same_start_and_actions_give_the_same(envs: VectorEnv) -> None:
    """In any slot, whatever the others do meanwhile."""
    begin(envs, [3, 4, 5, 3])
    chunk = actions(envs, N)
    chunk[3] = chunk[0]
    first = envs.chunk_step(chunk)
    again = begin(envs, [3], slots=[1])
    begin(envs, [8, 9], slots=[0, 2])
    envs.chunk_step(actions(envs, 2, seed=7), slots=[0, 2])
    second = envs.chunk_step(chunk[:1], slots=[1])
    for one in (0, 3):
        same({name: array[[one]] for name, array in first.observation.items()}, second.observation)
        np.testing.assert_array_equal(first.reward[one], second.reward[0])
    same(again, begin(envs, [3], slots=[2]))


def test_other_initial_states_differ(envs: VectorEnv) -> None:
    tasks = len(envs.spec.tasks)
    found = begin(envs, [0, tasks, 2 * tasks, 3 * tasks])
    state = next(iter(found.values())).reshape(N, -1)
    assert len(np.unique(state, axis=0)) == N


def test_a_chunk_is_its_actions_one_by_one(family: Family, envs: VectorEnv) -> None:
    chunk = actions(envs, N)
    whole = envs.chunk_step(chunk)
    begin(envs, range(N))
    parts = [envs.chunk_step(chunk[:, k : k + 1]) for k in range(K)]
    is_light = bool(family.settings.get("light"))
    if is_light:  # where only physics is computed inside a chunk, rewards are looked at with the last action
        np.testing.assert_allclose(
            whole.observation["state"][:, :18], parts[-1].observation["state"][:, :18], atol=1e-6
        )
        return
    same(whole.observation, parts[-1].observation)
    for name in ("reward", "terminated", "truncated", "valid"):
        np.testing.assert_array_equal(getattr(whole, name), np.concatenate([getattr(p, name) for p in parts], axis=1))
    np.testing.assert_array_equal(whole.success, parts[-1].success)


def test_states_go_round(family: Family, envs: VectorEnv) -> None:
    envs.chunk_step(actions(envs, N))
    states = envs.get_state()
    expected = envs.chunk_step(actions(envs, N, seed=1))
    envs.set_state(states)
    same(envs.chunk_step(actions(envs, N, seed=1)).observation, expected.observation, family.tolerance)
    other = family.make(N)
    other.set_state(states[::-1])
    result = other.chunk_step(actions(envs, N, seed=1)[::-1])
    same({k: v[::-1] for k, v in result.observation.items()}, expected.observation, family.tolerance)
    np.testing.assert_allclose(result.reward[::-1], expected.reward, rtol=0, atol=10 * family.tolerance)
    other.close()


def test_offloading_in_mid_episode_changes_nothing(family: Family, envs: VectorEnv) -> None:
    envs.chunk_step(actions(envs, N))
    states = envs.get_state()
    expected = envs.chunk_step(actions(envs, N, seed=1))
    envs.set_state(states)
    envs.offload()
    with pytest.raises(UserError, match="onload"):
        envs.chunk_step(actions(envs, N, seed=1))
    envs.onload()
    result = envs.chunk_step(actions(envs, N, seed=1))
    same(result.observation, expected.observation, family.tolerance)
    np.testing.assert_array_equal(result.truncated, expected.truncated)


def test_an_episode_ends_once_and_stays(envs: VectorEnv) -> None:
    """At the horizon at the latest; then nothing is valid, and the final observation is what there is to see."""
    horizon, chunk = envs.spec.horizon, actions(envs, N, envs.spec.horizon + 3)
    result = envs.chunk_step(chunk)
    assert result.ended.all()
    lengths = result.valid.sum(axis=1)
    assert (lengths <= horizon).all()
    for row, length in enumerate(lengths):
        assert result.valid[row, :length].all() and not result.valid[row, length:].any()
        assert not result.reward[row, length:].any()
        ends = (result.terminated | result.truncated)[row]
        assert ends.sum() == 1 and ends[length - 1]
        assert result.truncated[row, length - 1] == (not result.terminated[row, length - 1])
    after = envs.chunk_step(actions(envs, N))
    assert not after.valid.any() and not after.reward.any() and not after.ended.any()
    same(after.observation, result.observation)
    np.testing.assert_array_equal(after.success, result.success)
    begin(envs, [1], slots=[2])
    assert envs.chunk_step(actions(envs, 1), slots=[2]).valid[0, 0]


def test_actions_of_another_shape_are_refused(envs: VectorEnv) -> None:
    with pytest.raises(UserError, match=r"must be \[n, K, A\]"):
        envs.chunk_step(actions(envs, N)[:, :, :0])
    with pytest.raises(UserError, match="horizon"):
        envs.spec.check_chunk(envs.spec.horizon + 1)
