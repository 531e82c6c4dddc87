"""In a robot's episode, observations become prompts, and tokens become actions."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.types import Prompt, SamplingParams
from interlace.models.action_tokens import ActionTokens
from interlace.models.inputs import InputEmbedding, StateScaling
from interlace.robots.envs.fleet import EnvFleet
from interlace.robots.envs.load import EnvConfig
from interlace.robots.episodes.robot import (
    ExpertHelp,
    RobotConfig,
    RobotEpisode,
    _Account,
    _ask_expert,
    check_spaces,
)
from interlace.robots.features import Feature, StateFeatures
from interlace.robots.world_model.imagination import ImaginationConfig
from interlace.rollouts.envs.spec import ActionSpec, ArraySpec, EnvSpec, Start

READS = InputEmbedding(placeholder=50, per_observation=2, shapes={"state": (3,)})


def actions(**changed) -> ActionTokens:
    given = {
        "chunk": 2, "low": np.array([-1, 0], np.float32), "high": np.array([1, 4], np.float32), "num_bins": 8,
        "reads": READS,
    }  # fmt: skip
    return ActionTokens(**{**given, **changed})


def spec(**changed) -> EnvSpec:
    given = {
        "observation": {"state": ArraySpec(shape=(3,), dtype="float32")},
        "action": ActionSpec(low=-np.ones(2, np.float32), high=np.ones(2, np.float32)),
        "tasks": ("a",), "instructions": ("go",), "horizon": 10,
    }  # fmt: skip
    return EnvSpec(**{**given, **changed})


def config(**changed) -> RobotConfig:
    return RobotConfig(env=EnvConfig(family="gymnasium"), **changed)


def test_actions_survive_their_tokens():
    tokens = actions()
    given = np.array([[-1.0, 0.1], [0.99, 3.9]])
    found = tokens.decode(tokens.encode(given))
    np.testing.assert_allclose(found, given, atol=0.26)
    np.testing.assert_array_equal(tokens.encode(found), tokens.encode(given))
    assert tokens.encode(np.array([[9.0, 9.0], [-9.0, -9.0]])).tolist() == [7, 7, 0, 0]


@pytest.mark.parametrize("is_gaussian", [False, True])
def test_a_number_without_a_range_is_its_lower_end(is_gaussian):
    ones = np.array([0.5, 0.5], np.float32)
    tokens = actions(low=ones, high=ones + np.float32(1e-8), is_gaussian=is_gaussian)
    found = tokens.encode(np.array([[0.5, 0.5]] * 2))
    assert (found.view(np.float32) if is_gaussian else found).tolist() == [-1.0 if is_gaussian else 0] * 4


def test_tokens_may_count_down_from_the_vocabularys_end():
    tokens = actions(first_id=99, step=-1)
    assert tokens.encode(np.array([[-1.0, 0.0], [1.0, 4.0]])).tolist() == [99, 99, 92, 92]
    np.testing.assert_allclose(tokens.decode([99, 92, 92, 99]), [[-0.875, 3.75], [0.875, 0.25]])


def test_features_are_offsets_centred_scaled_and_cut():
    state = np.array([0.5, 2.0, 8.0], np.float32)
    features = (
        Feature(of=(1,), minus=(0,), scale=(3.0,)),
        Feature(of=(0, 2), center=(0.25, 0.0), scale=(0.5, 4.0)),
        Feature(of=(2,), scale=(4.0,), squash=True),
    )
    np.testing.assert_allclose(StateFeatures(features).of(state), [0.5, 0.5, 1.0, np.tanh(2.0)])
    np.testing.assert_array_equal(StateFeatures(()).of(state), state)


@pytest.mark.parametrize(
    ("given", "simulator", "words"),
    [
        ({"chunk": 11}, {}, "horizon"),
        ({"low": np.zeros(3, np.float32), "high": np.ones(3, np.float32)}, {}, "action_size=2"),
        ({}, {"observation": {"image": ArraySpec(shape=(8, 8, 3), dtype="uint8")}}, "reads 'state'"),
        ({}, {"observation": {"state": ArraySpec(shape=(5,), dtype="float32")}}, "state_size"),
        (
            {"low": np.zeros(1, np.float32), "high": np.ones(1, np.float32)},
            {"action": ActionSpec(low=np.zeros(1, np.float32), high=np.ones(1, np.float32), num_choices=2)},
            "bins=2",
        ),
        (
            {"low": -np.ones(1, np.float32), "high": np.ones(1, np.float32), "num_bins": 2},
            {"action": ActionSpec(low=np.zeros(1, np.float32), high=np.ones(1, np.float32), num_choices=2)},
            r"2 bins from -1 to 1 are not these. Set model.robot.bins=2, low=\[-0.5\] and high=\[1.5\]",
        ),
    ],
)
def test_a_policy_that_cannot_serve_a_simulator_is_refused(given, simulator, words):
    with pytest.raises(UserError, match=words):
        check_spaces(config(), spec(**simulator), actions(**given))


def test_a_text_model_is_no_robots_policy():
    from interlace.robots.episodes.robot import RobotEpisode

    class Session:
        params, seed, actions = SamplingParams(), 0, None

    prompt = Prompt(uid="a", token_ids=np.array([1], np.int32), text="", answer="", metadata={"task": 0})
    with pytest.raises(UserError, match="tiny:vla"):
        asyncio.run(RobotEpisode(config()).run(prompt, Session()))


def test_an_imagined_observation_is_not_prepared_again() -> None:
    ones = np.ones(3, np.float32)
    scaling = StateScaling(low=0 * ones, high=10 * ones, scaled=np.ones(3, np.bool_))
    policy = actions(reads=replace(READS, state=scaling))
    imagined = ImaginationConfig(max_error=1.0, published_in="models")
    episode = RobotEpisode(config(imagined=imagined))
    seen = episode.inputs({"state": np.array([1, 5, 9], np.float32)}, policy)["state"]
    np.testing.assert_allclose(seen, [[-0.8, 0, 0.8]], atol=1e-6)
    dream = RobotEpisode(
        config(imagined=imagined).configure_imagined(policy.chunk), EnvFleet(imagined.environments(policy.chunk))
    )
    np.testing.assert_array_equal(dream.inputs({"state": seen[0]}, policy)["state"], seen)


def test_the_expert_compares_actions_as_the_simulator_executes_them() -> None:
    policy = actions(low=-np.ones(1, np.float32), high=np.ones(1, np.float32), is_gaussian=True)
    fleet = EnvFleet(EnvConfig(family="tests.support.dot_simulator:Dot", settings={"tasks": ["far"]}, num_envs=1))

    async def ask(answer: float) -> tuple[bool, int]:
        account = _Account(context=[], task=0, expert=ExpertHelp(takes_over_above=0.5))
        async with fleet.episode(Start(task=0, init_state=0)) as env:
            expert = await env.expert_actions(policy.chunk)
            taken = await _ask_expert(env, policy, account, 0, answer * expert)
        assert np.abs(expert).min() == 1
        return taken is not None, account.num_taken_over

    async def ask_all() -> list[tuple[bool, int]]:
        try:
            return [await ask(answer) for answer in (1.6, 0.4)]
        finally:
            fleet.close()

    assert asyncio.run(ask_all()) == [(False, 0), (True, 1)]


def test_the_expert_acts_until_the_policy_is_close_to_it_again() -> None:
    policy = actions(low=-np.ones(1, np.float32), high=np.ones(1, np.float32), is_gaussian=True)
    fleet = EnvFleet(EnvConfig(family="tests.support.dot_simulator:Dot", settings={"tasks": ["far"]}, num_envs=1))

    async def ask_all(expert: ExpertHelp, answers: Sequence[float]) -> tuple[list[bool], _Account]:
        account, taken = _Account(context=[], task=0, expert=expert), []
        async with fleet.episode(Start(task=0, init_state=0)) as env:
            wanted = await env.expert_actions(policy.chunk)
            assert np.abs(wanted).min() == 1
            for turn, answer in enumerate(answers):
                found = await _ask_expert(env, policy, account, turn, answer * wanted)
                taken.append(found is not None)
        return taken, account

    async def ask_both() -> list[tuple[list[bool], _Account]]:
        given = (ExpertHelp(takes_over_above=0.5), ExpertHelp(takes_over_above=0.5, returns_below=0.1))
        try:
            return [await ask_all(each, (1.0, 0.4, 0.7, 0.8, 0.7)) for each in given]
        finally:
            fleet.close()

    # The differences are 0, 0.6, 0.3, 0.2 and 0.3; without returns_below the policy acts again at 0.25.
    (taken, account), (longer, _) = asyncio.run(ask_both())
    assert taken == [False, True, True, False, False] and longer == [False, True, True, True, True]
    assert sorted(account.shown) == [1, 2] and account.num_taken_over == 2


@pytest.mark.parametrize("given", [{"returns_below": 0.1}, {"takes_over_above": 0.5, "returns_below": 0.6}])
def test_an_expert_returns_below_the_difference_at_which_it_takes_over(given: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"Set takes_over_above, or lower returns_below"):
        ExpertHelp.parse(given)
