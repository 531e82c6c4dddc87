"""A Gaussian head: continuous actions, sampled by the rollout engine and trained by the train engine."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from interlace.core.errors import UserError
from interlace.core.types import Sample, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train import TrainEngine, sft_loss
from interlace.engines.train.config import OptimizerConfig, TrainConfig
from interlace.models.action_head import GaussianHead
from interlace.models.action_tokens import action_tokens
from interlace.models.config import RobotShape
from interlace.models.number_ids import numbers_to_ids
from interlace.robots.models.vla import build_tiny_vla
from tests.unit.engines.test_arrays_beside_tokens import NUM, request, sample_of, serve

SHAPE = RobotShape(state_size=6, action_size=3, chunk=2, head="gaussian", low=(-2, -1, 0), high=(2, 1, 4))


def served(temperature: float = 1.0, *, num: int = NUM) -> tuple[torch.nn.Module, list[Sample]]:
    model, tokenizer = build_tiny_vla(SHAPE, seed=3)
    params = SamplingParams(max_new_tokens=6, temperature=temperature)
    requests = [replace(request(model, tokenizer, index), params=params) for index in range(num)]
    done = serve(NativeEngine(model.eval(), config=NativeConfig(max_running=16, max_tokens=2048)), requests)
    return build_tiny_vla(SHAPE, seed=3)[0].eval(), [
        sample_of(done[one.owner.index], one.prompt_ids[:-4]) for one in requests
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_training_recomputes_the_log_probs_of_what_was_drawn(temperature: float) -> None:
    model, samples = served(temperature)
    train = TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig(temperature=temperature))
    for sample, found in zip(samples, train.logprobs(samples), strict=True):
        mask = sample.loss_mask
        np.testing.assert_allclose(found[mask], sample.logprobs[mask], atol=1e-5)
        numbers = sample.sampled_ids.view(np.float32)
        assert np.isfinite(numbers).all() and len(np.unique(numbers[:6])) == 6


def test_bits_do_not_depend_on_what_shares_a_batch() -> None:
    alone, together = served(num=1)[1], served()[1]
    np.testing.assert_array_equal(alone[0].token_ids, together[0].token_ids)
    np.testing.assert_array_equal(alone[0].logprobs, together[0].logprobs)


def test_a_request_without_query_tokens_is_refused_because_its_numbers_are_no_token_ids() -> None:
    model, tokenizer = build_tiny_vla(SHAPE, seed=3)
    engine = NativeEngine(model.eval(), config=NativeConfig(max_running=16, max_tokens=2048))
    params = SamplingParams(max_new_tokens=6)
    with pytest.raises(UserError, match="draws at once from query tokens"):
        engine.submit(replace(request(model, tokenizer, 0), params=params, query_ids=()))


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"presence_penalty": 0.5}, {"raw_logprobs": True}])
def test_a_request_whose_parameters_are_for_a_vocabulary_is_refused(setting: dict[str, object]) -> None:
    """Mean and standard deviation were read as the logits of two tokens: all numbers were 0."""
    model, tokenizer = build_tiny_vla(SHAPE, seed=3)
    engine = NativeEngine(model.eval(), config=NativeConfig(max_running=16, max_tokens=2048))
    params = SamplingParams.parse({"max_new_tokens": 6, **setting})
    with pytest.raises(UserError, match="no sampling parameter beyond temperature"):
        engine.submit(replace(request(model, tokenizer, 0), params=params))


def test_it_is_the_normal_distribution() -> None:
    outputs = torch.tensor([[0.3, -0.7]]).repeat(4000, 1)
    uniform = (np.arange(4000) + 0.5) / 4000
    head = GaussianHead()
    ids, logprobs = head.draw(outputs, np.ones(4000, np.float32), uniform)
    numbers = ids.astype(np.int32).view(np.float32)
    assert numbers.mean() == pytest.approx(0.3, abs=1e-3) and numbers.std() == pytest.approx(math.exp(-0.7), rel=1e-2)
    expected = torch.distributions.Normal(0.3, math.exp(-0.7))
    np.testing.assert_allclose(logprobs, expected.log_prob(torch.from_numpy(numbers)), atol=1e-5)
    found, entropy = head.logprobs(outputs, torch.from_numpy(ids), 1.0)
    np.testing.assert_allclose(found, logprobs, atol=1e-6)
    np.testing.assert_allclose(entropy[0], expected.entropy(), atol=1e-5)
    greedy, _ = head.draw(outputs[:1], np.zeros(1, np.float32), uniform[:1])
    assert greedy.astype(np.int32).view(np.float32)[0] == np.float32(0.3)


def test_numbers_are_actions_over_the_range_and_beyond() -> None:
    actions = action_tokens(build_tiny_vla(SHAPE, seed=3)[0].config)
    assert actions is not None
    wanted = np.array([[-2, 0, 4], [1, 0.5, 1]], np.float32)
    np.testing.assert_allclose(actions.decode(actions.encode(wanted, np.random.default_rng(0))), wanted, atol=1e-6)
    assert actions.decode(numbers_to_ids(np.full(6, 2, np.float32)))[0].tolist() == [4, 2, 6], "the simulator cuts off"


def test_a_step_towards_shown_actions_makes_them_likelier() -> None:
    model, samples = served(num=4)
    train = TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(lr=1e-3), config=TrainConfig())
    shown = [replace(one, advantages=np.ones(one.num_tokens, np.float32)) for one in samples]
    before = sum(float(each.sum()) for each in train.logprobs(shown))
    for _ in range(5):
        train.accumulate(shown)
        train.optimizer_step()
    assert sum(float(each.sum()) for each in train.logprobs(shown)) > before + 1


def test_numbers_are_not_drawn_one_behind_another() -> None:
    with pytest.raises(UserError, match="decoding=parallel"):
        RobotShape.parse({"state_size": 6, "action_size": 1, "chunk": 1, "head": "gaussian", "decoding": "tokens"})
