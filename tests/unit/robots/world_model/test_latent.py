"""A latent model learns pictures, rewards and ends from sequences, and imagines episodes of pictures."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from interlace.core.errors import UserError
from interlace.core.types import FinishReason, Prompt, Sample, SampleKey, Segment
from interlace.models.config import LatentConfig, WorldModelSettings
from interlace.robots.envs.load import create_envs
from interlace.robots.world_model.imagination import ERRORS, measured_horizon
from interlace.robots.world_model.latent import LatentModel, LatentModelConfig
from interlace.robots.world_model.load import create_world_model, load_world_model
from interlace.robots.world_model.model import Transitions, error_by_horizon, transitions_of

CONFIG = LatentModelConfig(
    image_size=16, action_size=1, chunk=1, filters=4, recurrent_size=32, stochastic_size=8, hidden_size=32, sequences=8,
    sequence_length=8, learning_rate=3e-3,
)  # fmt: skip
LENGTH = 12


def draw_bar(place: float) -> np.ndarray:
    """Draws a bar of three columns at a place from 0 to 12, [16, 16, 3]."""
    picture = np.full((16, 16, 3), 255, np.uint8)
    picture[4:12, round(place) : round(place) + 4] = 0
    return picture


def make_episodes(seed: int, count: int = 40) -> Transitions:
    """Returns episodes of a bar that an action moves; it ends beyond place 10, and the reward is the place."""
    random, rows = np.random.default_rng(seed), []
    for _ in range(count):
        place = random.uniform(0, 8)
        for turn in range(LENGTH):
            action = float(random.choice([-2, 2]))
            following = float(np.clip(place + action, 0, 12))
            end = float(following > 10)
            rows.append(
                (draw_bar(place), [action], draw_bar(following), 1 - end, following, 0.0, end, float(turn == 0))
            )
            place = following
            if end:
                break
    names = ("states", "chunks", "next_states", "has_next", "rewards", "successes", "ends", "firsts")
    columns = zip(*rows, strict=True)
    kinds = {"states": np.uint8, "next_states": np.uint8}
    return Transitions(
        **{name: np.asarray(column, kinds.get(name, np.float32)) for name, column in zip(names, columns, strict=True)}
    )


@pytest.fixture(scope="module")
def losses_and_model() -> tuple[list[float], LatentModel]:
    model, data = LatentModel(CONFIG, seed=1), make_episodes(1)
    return [model.fit(data, steps=60, seed=seed) for seed in range(5)], model


@pytest.fixture(scope="module")
def fitted(losses_and_model: tuple[list[float], LatentModel]) -> LatentModel:
    return losses_and_model[1]


def test_the_loss_on_a_fixed_replay_falls(losses_and_model: tuple[list[float], LatentModel]) -> None:
    losses, _ = losses_and_model
    assert losses[-1] < 0.5 * losses[0]


def test_states_pictures_and_predictions_have_the_shapes_of_the_interface() -> None:
    model, data = LatentModel(CONFIG), make_episodes(1, count=3)
    rows = model.list_starts(data)
    states = model.infer_states(data, rows)
    assert states.shape == (len(data), 32 + 8) and states.dtype == np.float32
    pictures = model.decode(states)
    assert pictures.shape == (len(data), 16, 16, 3) and pictures.dtype == np.uint8
    found = model.predict(states, data.chunks[rows])
    assert found.next_states.shape == states.shape and found.disagreement is None
    assert found.rewards.shape == found.ends.shape == found.successes.shape == (len(data),)


def test_it_imagines_pictures_rewards_and_ends_of_unseen_episodes(fitted: LatentModel) -> None:
    data = make_episodes(2)
    errors = error_by_horizon(fitted, data, (1, 2, 4))
    still = np.sqrt(((data.next_states.astype(float) - data.states)[data.has_next > 0] ** 2).mean()) / float(
        fitted.change_scale
    )
    assert errors[1] < 0.7 * still
    rows = np.arange(len(data))
    found = fitted.predict(fitted.infer_states(data, rows), data.chunks)
    assert np.corrcoef(found.rewards, data.rewards)[0, 1] > 0.9
    assert found.ends[data.ends > 0].mean() > 0.6 and found.ends[data.ends == 0].mean() < 0.2


def test_rewards_of_imagined_steps_follow_the_real_ones_of_the_same_actions(fitted: LatentModel) -> None:
    data = make_episodes(3)
    begins = [row for row in np.flatnonzero(data.firsts > 0) if not data.firsts[row + 1 : row + 5].any()]
    rows = np.asarray([row for row in begins if row + 5 <= len(data)])
    states, imagined, real = fitted.infer_states(data, rows), [], []
    for step in range(4):
        found = fitted.predict(states, data.chunks[rows + step])
        states = found.next_states
        imagined.append(found.rewards)
        real.append(data.rewards[rows + step])
    assert np.corrcoef(np.concatenate(imagined), np.concatenate(real))[0, 1] > 0.8


def test_a_state_depends_on_no_picture_of_an_earlier_episode(fitted: LatentModel) -> None:
    data = make_episodes(2, count=3)
    row = np.flatnonzero(data.firsts > 0)[1:2]
    changed = replace(data, states=np.where(np.arange(len(data))[:, None, None, None] < row, 0, data.states))
    np.testing.assert_array_equal(fitted.infer_states(data, row), fitted.infer_states(changed, row))


def test_a_fit_continues_from_the_saved_model_and_optimizer_bit_by_bit(tmp_path: Path) -> None:
    data = make_episodes(1, count=6)
    whole, stopped = LatentModel(CONFIG), LatentModel(CONFIG)
    for model in (whole, stopped):
        model.fit(data, steps=3, seed=1)
    whole.fit(data, steps=3, seed=2)
    stopped.save(tmp_path / "stopped", np.zeros((1, 40)))
    resumed, _ = load_world_model(tmp_path / "stopped")
    resumed.fit(data, steps=3, seed=2)
    for name, model in (("whole", whole), ("resumed", resumed)):
        model.save(tmp_path / name, np.zeros((1, 40)))
    for file in ("world_model.safetensors", "optimizer.safetensors"):
        first, second = (load_file(tmp_path / name / file) for name in ("whole", "resumed"))
        assert first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def test_the_measured_error_bounds_imagined_episodes(fitted: LatentModel, tmp_path: Path) -> None:
    data = make_episodes(2)
    starts = fitted.infer_states(data, np.flatnonzero(data.firsts > 0)[:4])
    fitted.save(tmp_path, starts, {1: 0.2, 2: 0.4, 4: 0.7, 8: 0.3})
    assert [measured_horizon(tmp_path, bound, 6) for bound in (None, 0.1, 0.2, 0.5, 0.8)] == [6, 0, 1, 2, 6]
    settings = {"tasks": ["dream"], "model": str(tmp_path), "max_error": 0.5, "horizon": 50}
    envs = create_envs("imagined", settings, 4)
    assert envs.reset(seeds=[0] * 4, task_ids=[0] * 4, init_state_ids=range(4))["image"].shape == (4, 16, 16, 3)
    result = envs.chunk_step(np.zeros((4, 3, 1), np.float32))
    assert result.truncated[:, 1].all() and not result.valid[:, 2].any()
    for errors in ({}, {1: math.nan, 2: 0.1}):
        (tmp_path / ERRORS).write_text(json.dumps(errors))
        assert measured_horizon(tmp_path, 0.5, 6) == 0


def test_imagined_episodes_end_as_the_model_predicts(fitted: LatentModel, tmp_path: Path) -> None:
    data = make_episodes(2)
    at_the_edge = np.flatnonzero((data.ends > 0) & (data.chunks[:, 0] > 0))[:4]
    starts = fitted.infer_states(data, at_the_edge)
    fitted.save(tmp_path, starts)
    envs = create_envs(
        "imagined", {"tasks": ["dream"], "model": str(tmp_path), "horizon": 50, "max_disagreement": None}, 4
    )
    envs.reset(seeds=[0] * 4, task_ids=[0] * 4, init_state_ids=range(4))
    result = envs.chunk_step(np.ones((4, 1, 1), np.float32))
    expected = fitted.predict(starts, np.ones((4, 1), np.float32))
    np.testing.assert_array_equal(result.terminated[:, 0], expected.ends > 0.5)
    np.testing.assert_allclose(result.reward[:, 0], expected.rewards, rtol=1e-4)
    np.testing.assert_array_equal(result.observation["image"], fitted.decode(expected.next_states))


def test_imagined_actions_have_the_bounds_of_the_policy(tmp_path: Path) -> None:
    settings = WorldModelSettings(kind="latent", latent=LatentConfig(filters=2, recurrent_size=8, hidden_size=8))
    data = make_episodes(1, count=2)
    model = create_world_model(settings, data, (-2.0,), (2.0,))
    model.save(tmp_path, model.infer_states(data, np.arange(1)))
    action = create_envs("imagined", {"tasks": ["dream"], "model": str(tmp_path)}, 1).spec.action
    assert (action.low.tolist(), action.high.tolist()) == ([-2], [2])


def make_sample(finish: FinishReason, inputs: dict[str, np.ndarray]) -> Sample:
    turns = tuple(
        Segment(parent=None, token_ids=np.array([turn], np.int32), reward=0.5, inputs=inputs) for turn in range(2)
    )
    prompt = Prompt(uid="p", token_ids=np.zeros(1, np.int32), text="", answer="")
    return Sample(key=SampleKey(0, 0), prompt=prompt, segments=turns, reward=0.0, finish_reason=finish)


def test_transitions_of_pictures_keep_their_type_and_the_end_of_the_task() -> None:
    picture = {"image": draw_bar(3)[None]}
    samples = [make_sample(FinishReason.STOP, picture), make_sample(FinishReason.LENGTH, picture)]
    found = transitions_of(samples, lambda tokens: tokens.astype(np.float32)[:, None], array="image")
    assert found.states.shape == (4, 16, 16, 3) and found.states.dtype == np.uint8
    assert found.ends.tolist() == [0, 1, 0, 0] and found.has_next.tolist() == [1, 0, 1, 0]


def test_state_vectors_and_no_data_are_refused() -> None:
    states = {"state": np.zeros((1, 3), np.float32)}
    with pytest.raises(UserError, match=r"world_model\.kind"):
        transitions_of([make_sample(FinishReason.STOP, states)], lambda tokens: tokens, array="image")
    with pytest.raises(UserError, match="no transitions to learn from"):
        LatentModel(CONFIG).fit(transitions_of([], lambda tokens: tokens, array="image"), steps=1)
