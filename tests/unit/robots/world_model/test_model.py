"""A world model learns a simulator's steps, estimates its uncertainty, and imagines episodes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.types import FINAL, Prompt, Sample, SampleKey, Segment
from interlace.models.published import publish_model
from interlace.robots.envs.load import create_envs
from interlace.robots.world_model.load import load_world_model
from interlace.robots.world_model.model import (
    EnsembleModel,
    EnsembleModelConfig,
    Transitions,
    error_by_horizon,
    transitions_of,
)

CONFIG = EnsembleModelConfig(state_size=2, action_size=1, chunk=2, width=64)
EPISODES, CHUNKS = 64, 8


def walked(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States [episodes, T + 1, D], chunks [episodes, T, C] and rewards [episodes, T] of real walks."""
    settings = {"tasks": ["right", "left"], "horizon": 100, "end_on_success": False}
    envs = create_envs("tests.contract.envs:Walk", settings, EPISODES)
    tasks = [index % 2 for index in range(EPISODES)]
    starts = [1000 * seed + index for index in range(EPISODES)]
    states = [envs.reset(seeds=starts, task_ids=tasks, init_state_ids=starts)["state"]]
    chunks = np.random.default_rng(seed).uniform(-1, 1, (EPISODES, CHUNKS, 2, 1)).astype(np.float32)
    rewards = []
    for place in range(CHUNKS):
        result = envs.chunk_step(chunks[:, place])
        states.append(result.observation["state"])
        rewards.append(result.reward.sum(axis=1))
    return np.stack(states, axis=1), chunks.reshape(EPISODES, CHUNKS, 2), np.stack(rewards, axis=1)


def transitions(states: np.ndarray, chunks: np.ndarray, rewards: np.ndarray) -> Transitions:
    rows = EPISODES * CHUNKS
    return Transitions(
        states=states[:, :-1].reshape(rows, 2),
        chunks=chunks.reshape(rows, 2),
        next_states=states[:, 1:].reshape(rows, 2),
        has_next=np.ones(rows, np.float32),
        rewards=rewards.reshape(rows),
        successes=(states[:, 1:, 0] > 2.5).reshape(rows).astype(np.float32),
        ends=np.zeros(rows, np.float32),
        firsts=(np.arange(rows) % CHUNKS == 0).astype(np.float32),
    )


@pytest.fixture(scope="module")
def fitted() -> EnsembleModel:
    model = EnsembleModel(CONFIG, seed=1)
    model.fit(transitions(*walked(1)), steps=400, lr=3e-3)
    return model


def test_it_predicts_what_it_has_not_seen_and_its_error_grows_with_the_horizon(fitted: EnsembleModel) -> None:
    states, chunks, rewards = walked(2)
    by_horizon = error_by_horizon(fitted, transitions(states, chunks, rewards), range(1, CHUNKS + 1))
    errors = np.asarray([by_horizon[place] for place in range(1, CHUNKS + 1)])
    still = np.sqrt((((states[:, :1] - states[:, 1:]) / fitted.change_scale.numpy()) ** 2).mean(axis=(0, 2)))
    assert errors[0] < 0.25 * still[0] and (errors < 0.6 * still).all()
    assert errors[-1] > errors[0]
    found = fitted.predict(states[:, 0], chunks[:, 0])
    assert np.abs(found.rewards - rewards[:, 0]).mean() < 0.3 * rewards[:, 0].std()


def test_a_number_that_always_changes_alike_is_scaled_by_its_change() -> None:
    data = transitions(*walked(1))
    clock = np.tile(np.arange(CHUNKS, dtype=np.float32), EPISODES)[:, None]
    data = replace(
        data,
        states=np.concatenate([data.states, 3 * clock], 1),
        next_states=np.concatenate([data.next_states, 3 * clock + 3], 1),
    )
    model = EnsembleModel(CONFIG.model_copy(update={"state_size": 3}), seed=1)
    model.fit(data, steps=1)
    assert model.change_scale[2] == 3


def test_members_disagree_where_there_was_no_data(fitted: EnsembleModel) -> None:
    states, chunks, _ = walked(2)
    inside = fitted.predict(states[:, 0], chunks[:, 0]).disagreement
    outside = fitted.predict(states[:, 0] + 40, chunks[:, 0]).disagreement
    assert outside.mean() > 5 * inside.mean()


def test_imagined_episodes_follow_the_real_ones_and_end_where_the_ensemble_disagrees(
    fitted: EnsembleModel, tmp_path: Path
) -> None:
    states, chunks, _ = walked(3)
    fitted.save(tmp_path, states[:, 0])
    model, starts = load_world_model(tmp_path)
    np.testing.assert_array_equal(starts, states[:, 0])
    for bound, ends in ((0.5, False), (1e-9, True)):
        settings = {"tasks": ["dream"], "model": str(tmp_path), "max_disagreement": bound, "horizon": 50}
        envs = create_envs("imagined", {**settings, "end_on_success": False}, 4)
        envs.reset(seeds=[0] * 4, task_ids=[0] * 4, init_state_ids=range(4))
        result = envs.chunk_step(chunks[:4, 0, :, None])
        assert result.truncated[:, 1].all() == ends
        np.testing.assert_allclose(
            result.observation["state"], model.predict(starts[:4], chunks[:4, 0]).next_states, atol=1e-5
        )


def test_an_imagined_episode_keeps_the_model_of_its_reset(tmp_path: Path) -> None:
    starts, actions, found = np.zeros((4, 2), np.float32), np.full((1, 2, 1), 0.5, np.float32), []
    for interferes in (False, True):
        folder = tmp_path / str(interferes)

        def publish(step: int, folder: Path = folder) -> None:
            publish_model(folder, step, lambda own: EnsembleModel(CONFIG, seed=step).save(own, starts))

        publish(1)
        settings = {"tasks": ["dream"], "horizon": 12, "model": str(folder), "max_disagreement": 1e9}
        envs = create_envs("imagined", settings, 2)
        envs.reset(seeds=[0], task_ids=[0], init_state_ids=[0], slots=[0])
        publish(2)
        if interferes:
            envs.reset(seeds=[0], task_ids=[0], init_state_ids=[1], slots=[1])
        found += [envs.chunk_step(actions, slots=[0]).observation["state"]]
        later = envs.reset(seeds=[0], task_ids=[0], init_state_ids=[0], slots=[0])["state"]
        assert (envs.chunk_step(actions, slots=[0]).observation["state"] != found[-1]).any(), "a reset has the newest"
        np.testing.assert_array_equal(later, starts[:1])
    np.testing.assert_array_equal(found[0], found[1])


def test_the_same_data_and_seed_give_the_same_model() -> None:
    data = transitions(*walked(1))
    first, second = (EnsembleModel(CONFIG, seed=2) for _ in range(2))
    assert first.fit(data, steps=5, seed=3) == second.fit(data, steps=5, seed=3)


def sample(inputs: dict[str, np.ndarray] | None = None) -> Sample:
    turns = tuple(
        Segment(
            parent=None, token_ids=np.array([turn, 2], np.int32), reward=0.5,
            inputs={"state": np.array([[turn, 7.0]], np.float32)} if inputs is None else inputs,
        )
        for turn in range(3)
    )  # fmt: skip
    prompt = Prompt(uid="p", token_ids=np.zeros(1, np.int32), text="", answer="")
    return Sample(key=SampleKey(0, 0), prompt=prompt, segments=turns, reward=1.0)


def test_transitions_are_turns_and_those_that_follow() -> None:
    found = transitions_of([sample(), sample()], lambda tokens: tokens.astype(np.float32)[:, None])
    assert found.states[:, 0].tolist() == [0, 1, 2, 0, 1, 2] and found.next_states[:2, 0].tolist() == [1, 2]
    assert found.has_next.tolist() == [1, 1, 0, 1, 1, 0]
    assert found.successes.tolist() == [0, 0, 1, 0, 0, 1] and found.chunks[1].tolist() == [1, 2]


def test_the_turns_of_a_sample_see_what_their_context_was_given_and_its_end_what_came_after() -> None:
    def context(number: float) -> Segment:
        sees = {"state": np.array([[number, 7.0]], np.float32)}
        return Segment(token_ids=np.array([9], np.int32), sampled=np.zeros(1, np.bool_), inputs=sees)

    answers = [Segment(parent=place, token_ids=np.array([1, 2], np.int32)) for place in (0, 2)]
    end = Segment(parent=4, token_ids=np.zeros(1, np.int32), sampled=np.zeros(1, np.bool_), kind=FINAL)
    segments = (context(0), answers[0], context(1), answers[1], context(2), end)
    one = replace(sample(), segments=segments)
    found = transitions_of([one], lambda tokens: tokens.astype(np.float32)[:, None])
    assert found.states[:, 0].tolist() == [0, 1] and found.next_states[:, 0].tolist() == [1, 2]
    assert found.has_next.tolist() == [1, 1] and found.firsts.tolist() == [1, 0]
    cut = replace(answers[1], sampled=np.array([True, False]))
    one = replace(sample(), segments=(*segments[:3], cut, *segments[4:]))
    found = transitions_of([one], lambda tokens: tokens.astype(np.float32)[:, None])
    assert found.has_next.tolist() == [1, 0], "the state after a whole chunk is unknown"


def test_a_chunk_before_an_expert_takes_over_leads_to_the_state_in_which_it_does() -> None:
    def turn(number: float, sampled: np.ndarray | None, place: int) -> tuple[Segment, Segment]:
        sees = {"state": np.array([[number, 7.0]], np.float32)}
        context = Segment(token_ids=np.array([9], np.int32), sampled=np.zeros(1, np.bool_), inputs=sees)
        return context, Segment(parent=2 * place, token_ids=np.array([1, 2], np.int32), sampled=sampled)

    taken_over = np.zeros(2, np.bool_)
    segments = [each for place in range(4) for each in turn(place, taken_over if place == 1 else None, place)]
    one = replace(sample(), segments=tuple(segments))
    found = transitions_of([one], lambda tokens: tokens.astype(np.float32)[:, None])
    assert found.states[:, 0].tolist() == [0, 2, 3] and found.next_states[:2, 0].tolist() == [1, 3]
    assert found.has_next.tolist() == [1, 1, 0] and found.firsts.tolist() == [1, 1, 0]


def test_what_it_cannot_learn_from_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without a `state`"):
        transitions_of([sample({"image": np.zeros(3)})], lambda tokens: tokens)
    with pytest.raises(UserError, match="no transitions to learn from"):
        EnsembleModel(CONFIG).fit(transitions_of([], lambda tokens: tokens), steps=1)
    with pytest.raises(UserError, match="contains no world model"):
        create_envs("imagined", {"tasks": ["dream"], "model": str(tmp_path)}, 1)
