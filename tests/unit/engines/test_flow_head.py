"""A flow-matching head: a chain of numbers, sampled by the rollout engine and trained by the train engine."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from interlace.core.errors import UserError
from interlace.core.training import LossInputs, LossOutputs
from interlace.core.types import Sample, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train import TrainEngine, sft_loss
from interlace.engines.train.config import OptimizerConfig, TrainConfig
from interlace.models.action_tokens import action_tokens
from interlace.models.config import RobotShape
from interlace.models.flow import FlowSchedule
from interlace.robots.models.vla import VLAForCausalLM, build_tiny_vla
from tests.unit.engines.test_arrays_beside_tokens import NUM, request, sample_of, serve

STEPS, CHUNK, SIZE, PADDED = 3, 2, 3, 4
KINDS = ({}, {"sampler": "noise"}, {"noise_at": 0}, {"steps": 1})


def shape(**flow: object) -> RobotShape:
    settings = {"steps": STEPS, "padded_size": PADDED, "condition_size": 8, "expert_width": 32, **flow}
    return RobotShape.parse({"state_size": 6, "action_size": SIZE, "chunk": CHUNK, "head": "flow", "flow": settings})


def served(
    temperature: float = 1.0, *, num: int = NUM, max_running: int = 16, **flow: object
) -> tuple[VLAForCausalLM, list[Sample]]:
    model, tokenizer = build_tiny_vla(shape(**flow), seed=3)
    tokens = action_tokens(model.config)
    assert tokens is not None
    params = SamplingParams(max_new_tokens=tokens.num_tokens, temperature=temperature)
    requests = [replace(request(model, tokenizer, index), params=params) for index in range(num)]
    done = serve(NativeEngine(model.eval(), config=NativeConfig(max_running=max_running, max_tokens=4096)), requests)
    return build_tiny_vla(shape(**flow), seed=3)[0].eval(), [
        _first_turn(sample_of(done[one.owner.index], one.prompt_ids[:-4])) for one in requests
    ]


def _first_turn(sample: Sample) -> Sample:
    return replace(sample, segments=sample.segments[:2])


@pytest.mark.parametrize("flow", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_training_recomputes_the_log_probs_of_the_rollout(temperature: float, flow: dict[str, object]) -> None:
    model, samples = served(temperature, **flow)
    train = TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig(temperature=temperature))
    for sample, found in zip(samples, train.logprobs(samples), strict=True):
        mask = sample.loss_mask
        np.testing.assert_allclose(found[mask], sample.logprobs[mask], atol=1e-5)
        padding = np.arange(mask.sum()) % PADDED >= SIZE
        assert (found[mask][padding] == 0).all() and (found[mask][~padding] != 0).all()


def test_the_log_prob_is_the_density_of_each_step_written_out() -> None:
    model, [sample, *_] = served(num=2)
    config = model.lm_head.schedule.config
    chain = torch.from_numpy(sample.sampled_ids.copy()).view(torch.float32).view(STEPS + 1, CHUNK * PADDED)
    ids = torch.from_numpy(sample.sampled_ids.astype(np.int64))
    captured = []
    model.lm_head.expert.register_forward_pre_hook(lambda _, args: captured.append(args[0].detach()))
    TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig()).logprobs([sample])
    conditions = captured[-1][:, : CHUNK * config.condition_size]
    wanted = [torch.distributions.Normal(0, 1).log_prob(chain[0])]
    for step in range(STEPS):
        t, d = 1 - step / STEPS, 1 / STEPS
        with torch.no_grad():
            turns = t * math.pi * torch.tensor([[1.0, 2.0, 4.0, 8.0]])
            features = torch.cat([conditions, chain[step][None], torch.tensor([[t]]), turns.sin(), turns.cos()], 1)
            v = model.lm_head.expert(features)[0]
        x0, x1 = chain[step] - v * t, chain[step] + v * (1 - t)
        s = config.noise_level * math.sqrt(t / (1 - (t if t < 1 else 1 - d)))
        mean = x0 * (1 - (t - d)) + x1 * (t - d - s * s * d / (2 * t))
        wanted.append(torch.distributions.Normal(mean, math.sqrt(d) * s).log_prob(chain[step + 1]))
    real = torch.arange(CHUNK * PADDED) % PADDED < SIZE
    expected = torch.where(real, torch.stack(wanted), 0.0).flatten()
    np.testing.assert_allclose(sample.logprobs[-len(ids) :], expected, atol=1e-4)


def test_bits_do_not_depend_on_the_other_rows_of_a_batch() -> None:
    alone, together = served(num=1)[1], served(num=NUM, max_running=64)[1]
    np.testing.assert_array_equal(alone[0].token_ids, together[0].token_ids)
    np.testing.assert_array_equal(alone[0].logprobs, together[0].logprobs)


def test_a_greedy_chain_is_the_deterministic_flow() -> None:
    model, [sample, *_] = served(0.0, num=2)
    chain = sample.sampled_ids.view(np.float32).reshape(STEPS + 1, -1)
    assert (chain[0] == 0).all()
    assert np.array_equal(served(0.0, num=2)[1][0].sampled_ids, sample.sampled_ids)
    assert model.lm_head.schedule.num_tokens == len(sample.sampled_ids)


def test_time_runs_the_other_way_if_noise_is_at_0() -> None:
    at_one, at_zero = (FlowSchedule(config=shape(noise_at=at).flow, chunk=1, size=1) for at in (1, 0))
    assert [at_one.network_time(step) for step in range(STEPS)] == [1, 1 - 1 / 3, 1 - 2 / 3]
    assert [at_zero.network_time(step) for step in range(STEPS)] == [0, 1 - (1 - 1 / 3), 1 - (1 - 2 / 3)]
    assert (at_one.velocity_sign, at_zero.velocity_sign) == (1, -1)


@pytest.mark.slow
@pytest.mark.parametrize("flow", [{}, {"noise_at": 0, "sampler": "noise"}])
def test_imitation_teaches_the_flow_the_shown_actions(flow: dict[str, object]) -> None:
    model, samples = served(num=8, **flow)
    actions = action_tokens(model.config)
    assert actions is not None
    draw = np.random.default_rng(0)
    wanted = np.array([[0.5, -0.5, 0.2], [-0.3, 0.6, 0.0]], np.float32)
    settings = OptimizerConfig(lr=3e-3)
    train = TrainEngine(model, loss=sft_loss, optimizer=settings, config=TrainConfig())
    for _ in range(150):
        shown = [_answered(sample, actions.encode(wanted, draw)) for sample in samples for _ in range(6)]
        train.accumulate(shown)
        train.optimizer_step()
    taught, tokenizer = build_tiny_vla(shape(**flow), seed=3)
    taught.load_state_dict(train.model.state_dict())
    engine = NativeEngine(taught.eval(), config=NativeConfig(max_running=16, max_tokens=4096))
    params = SamplingParams(max_new_tokens=actions.num_tokens, temperature=0.0)
    [done] = serve(engine, [replace(request(taught, tokenizer, 0), params=params)]).values()
    found = actions.decode(done.token_ids)
    assert np.abs(found - wanted).mean() < 0.15, found


def _answered(sample: Sample, ids: np.ndarray) -> Sample:
    *context, answer = sample.segments
    segments = (*context, replace(answer, token_ids=ids))
    return replace(sample, segments=segments, advantages=np.ones(sample.num_tokens, np.float32))


def test_chains_are_not_drawn_one_number_after_another() -> None:
    with pytest.raises(UserError, match="decoding=parallel"):
        RobotShape.parse({"state_size": 6, "action_size": 1, "chunk": 1, "head": "flow", "decoding": "tokens"})


@pytest.mark.parametrize("flow", KINDS)
def test_actions_that_were_not_executed_are_left_out_of_the_chains_density(flow: dict[str, object]) -> None:
    model, samples = served(num=4, **flow)
    actions = action_tokens(model.config)
    assert actions is not None
    executed = actions.trained(np.array([True, False]))
    *context, answer = samples[0].segments
    cut = replace(samples[0], segments=(*context, replace(answer, sampled=executed)))

    def weigh(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(loss_T=-inputs.logprobs_T * inputs.advantages_T, metrics_T={})

    def engine() -> TrainEngine:
        model = build_tiny_vla(shape(**flow), seed=3)[0].eval()
        return TrainEngine(model, loss=weigh, optimizer=OptimizerConfig(), config=TrainConfig())

    whole = engine().logprobs(samples)
    found = engine().logprobs([cut, *samples[1:]])
    np.testing.assert_allclose(found[0], np.where(cut.loss_mask, whole[0], 0), atol=1e-6)
    for one, other in zip(found[1:], whole[1:], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)

    # Directly: the gradient of the sum of the log-probs of the executed actions' numbers, over the whole chain.
    weights = np.zeros(samples[0].num_tokens, np.float32)
    weights[-len(executed) :] = executed
    direct, masked = engine(), engine()
    direct.accumulate([replace(samples[0], advantages=weights)])
    masked.accumulate([replace(cut, advantages=np.ones(cut.num_tokens, np.float32))])
    for (name, one), (_, other) in zip(direct.model.named_parameters(), masked.model.named_parameters(), strict=True):
        if one.grad is not None:
            np.testing.assert_allclose(other.grad, one.grad, atol=1e-4, rtol=1e-4, err_msg=name)
    assert any(one.grad is not None and one.grad.abs().max() > 0 for one in masked.model.parameters())
