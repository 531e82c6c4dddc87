"""Soft actor-critic: one update against plain torch, the squashed head, resume, and refusals."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from interlace.algorithms import create_algorithm
from interlace.core.errors import InterlaceError, UserError
from interlace.core.random import stable_hash
from interlace.core.transitions import TransitionBatch
from interlace.core.types import SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train import TrainEngine, sft_loss
from interlace.engines.train.actor_critic import ActorCriticEngine
from interlace.engines.train.answer_rows import reads_answers_alone
from interlace.engines.train.config import OptimizerConfig, TrainConfig
from interlace.engines.train.one_layer import has_one_layer
from interlace.engines.train.transition_engine import ContextRow
from interlace.models.action_head import SquashedHead
from interlace.models.config import RobotShape
from interlace.models.number_ids import numbers_to_ids
from interlace.robots.models.vla import build_tiny_vla
from tests.unit.engines.test_arrays_beside_tokens import NUM, request, sample_of, serve

SHAPE = RobotShape(state_size=5, state_tokens=2, action_size=2, chunk=2, head="squashed", layers=2)
BATCH = 6
OPTIMIZER = OptimizerConfig(lr=1e-3, betas=(0.9, 0.999), max_grad_norm=None)


def engine(seed: int = 3, shape: RobotShape = SHAPE, **settings: object) -> ActorCriticEngine:
    small = {"critic_width": 16, "turns_per_update": BATCH, "critic_lr": 3e-3, "temperature_lr": 1e-2, **settings}
    model = build_tiny_vla(shape, seed=1)[0]
    algorithm = create_algorithm("sac", small)
    return ActorCriticEngine(model, algorithm=algorithm, optimizer=OPTIMIZER, config=TrainConfig(), seed=seed)


def context(made: ActorCriticEngine) -> np.ndarray:
    placeholder = made.model.config.placeholder_token_id
    return np.array([300, 301, 302, *[placeholder] * SHAPE.state_tokens], np.int32)


def transitions(key: int) -> TransitionBatch:
    draw = np.random.default_rng(key)
    return TransitionBatch(
        states=draw.normal(size=(BATCH, 5)).astype(np.float32),
        actions=draw.uniform(-1, 1, (BATCH, 4)).astype(np.float32),
        rewards=draw.normal(size=BATCH).astype(np.float32),
        next_states=draw.normal(size=(BATCH, 5)).astype(np.float32),
        discounts=np.array([0.9, 0.9, 0.0, 0.81, 0.9, 0.0], np.float32),
    )


class Reference:
    """SAC as in the paper, with transformers' own attention, separate critics, and torch's distributions."""

    def __init__(self, made: ActorCriticEngine) -> None:
        self.model = build_tiny_vla(SHAPE, seed=1)[0]
        self.context = torch.tensor([[*context(made), *self.model.config.query_token_ids]])
        self.critics = [self._critic(made.critics.state_dict(), place) for place in range(2)]
        self.targets = [self._critic(made.critics.state_dict(), place) for place in range(2)]
        self.log_alpha = torch.zeros((), requires_grad=True)
        own = [each for critic in self.critics for each in critic.parameters()]
        self.critic_adam = torch.optim.Adam(own, lr=3e-3)
        self.policy_adam = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.alpha_adam = torch.optim.Adam([self.log_alpha], lr=1e-2)

    @staticmethod
    def _critic(state: Mapping[str, torch.Tensor], place: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for number in range(3):
            weight, bias = state[f"weights.{number}"][place], state[f"biases.{number}"][place, 0]
            layer = nn.Linear(*weight.shape)
            layer.load_state_dict({"weight": weight.T.clone(), "bias": bias.clone()})
            layers += [layer, nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def act(self, states: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.context.repeat(len(states), 1)
        places = torch.nonzero(ids.flatten() == self.model.config.placeholder_token_id)[:, 0]
        outputs = self.model(input_ids=ids, inputs={"state": states}, input_places=places).logits[:, -4:]
        normal = torch.distributions.Normal(outputs[..., 0], outputs[..., 1].clamp(-5, 2).exp())
        before = normal.loc + noise * normal.scale
        logprobs = normal.log_prob(before) - torch.log(1 - torch.tanh(before) ** 2)
        return torch.tanh(before), logprobs.sum(1)

    def update(self, batch: TransitionBatch, noises: torch.Tensor) -> None:
        states, actions, rewards, following, discounts = (
            torch.from_numpy(each)
            for each in (batch.states, batch.actions, batch.rewards, batch.next_states, batch.discounts)
        )
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            next_actions, next_logprobs = self.act(following, noises[0])
            given = torch.cat([following, next_actions], 1)
            smallest = torch.minimum(self.targets[0](given)[:, 0], self.targets[1](given)[:, 0])
            wanted = rewards + discounts * (smallest - alpha * next_logprobs)
        given = torch.cat([states, actions], 1)
        self.critic_adam.zero_grad()
        sum(0.5 * F.mse_loss(critic(given)[:, 0], wanted) for critic in self.critics).backward()
        self.critic_adam.step()
        drawn, logprobs = self.act(states, noises[1])
        given = torch.cat([states, drawn], 1)
        value = torch.minimum(self.critics[0](given)[:, 0], self.critics[1](given)[:, 0])
        self.policy_adam.zero_grad()
        (alpha * logprobs - value).mean().backward()
        self.policy_adam.step()
        self.alpha_adam.zero_grad()
        (-self.log_alpha * (logprobs.detach() - 4)).mean().backward()
        self.alpha_adam.step()
        for target, critic in zip(self.targets, self.critics, strict=True):
            for moved, own in zip(target.parameters(), critic.parameters(), strict=True):
                moved.data = 0.995 * moved.data + 0.005 * own.data


def noises(made: ActorCriticEngine, seed: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(stable_hash("soft actor-critic", seed, made.num_learned))
    return torch.randn((2, BATCH, 4), generator=noise)


def test_three_updates_are_those_of_plain_torch() -> None:
    made = engine()
    plain = Reference(made)
    for key in range(3):
        plain.update(transitions(key), noises(made, 3))
        made.learn(context(made), transitions(key))
    for place in range(2):
        for number, layer in enumerate(plain.critics[place][::2]):
            assert isinstance(layer, nn.Linear)
            torch.testing.assert_close(made.critics.weights[number][place].T, layer.weight, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(
                made.targets.weights[number][place].T, plain.targets[place][2 * number].weight, atol=1e-5, rtol=1e-4
            )
    assert made.temperature == pytest.approx(float(plain.log_alpha.detach().exp()), rel=1e-5) and made.temperature < 1
    theirs = dict(plain.model.named_parameters())
    moved = build_tiny_vla(SHAPE, seed=1)[0]
    for name, own in made.model.named_parameters():
        torch.testing.assert_close(own, theirs[name], atol=5e-5, rtol=1e-3)
    assert any(not torch.equal(own, theirs[name]) for name, own in moved.named_parameters())


def test_the_head_has_the_density_of_a_squashed_normal_number() -> None:
    outputs = torch.tensor([[0.4, -0.5]]).repeat(2000, 1)
    head = SquashedHead()
    ids, logprobs = head.draw(outputs, np.ones(2000, np.float32), (np.arange(2000) + 0.5) / 2000)
    numbers = torch.from_numpy(ids.astype(np.int32).view(np.float32))
    assert float(numbers.abs().max()) < 1
    normal = torch.distributions.Normal(torch.tensor(0.4).double(), torch.tensor(math.exp(-0.5)).double())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    np.testing.assert_allclose(logprobs, squashed.log_prob(numbers.double()), atol=2e-4)
    np.testing.assert_allclose(head.logprobs(outputs, torch.from_numpy(ids), 1.0)[0], logprobs, atol=1e-6)
    noise = torch.linspace(-3, 3, 2000)
    drawn, found = head.sample(outputs, noise)
    np.testing.assert_allclose(found, squashed.log_prob(drawn.double()), atol=2e-3)
    greedy, _ = head.draw(outputs[:1], np.zeros(1, np.float32), np.full(1, 0.3))
    assert greedy.astype(np.int32).view(np.float32)[0] == pytest.approx(math.tanh(0.4))


@pytest.mark.parametrize("mean", [-75.0, -500.0, 500.0])
@pytest.mark.parametrize("number", [1.0, 0.5])
def test_the_gradient_of_a_squashed_number_is_finite_far_from_the_mean(mean: float, number: float) -> None:
    outputs = torch.tensor([[mean, -5.0]], requires_grad=True)
    ids = torch.from_numpy(numbers_to_ids(np.array([number], np.float32)))
    SquashedHead().logprobs(outputs, ids, 1.0)[0].sum().backward()
    assert outputs.grad is not None and bool(outputs.grad.isfinite().all())


def test_imitated_actions_at_an_end_of_the_range_leave_the_others_exact() -> None:
    head = SquashedHead()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    adam = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(400):
        states = torch.rand(128, 1) - 0.5
        wanted = (5 * states[:, 0]).clamp(-1, 1)  # most are at an end
        logprobs, _ = head.logprobs(network(states), torch.from_numpy(numbers_to_ids(wanted.numpy())), 1.0)
        adam.zero_grad()
        (-logprobs.mean()).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adam.step()
    states = torch.linspace(-0.19, 0.19, 99)[:, None]
    with torch.no_grad():
        gaps = network(states)[:, 0].tanh() - 5 * states[:, 0]
        end = network(torch.tensor([[0.4]]))[0, 0].tanh()
    assert float(gaps.abs().mean()) < 0.1 and float(end) > 0.98


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_training_recomputes_the_log_probs_of_what_was_drawn(temperature: float) -> None:
    shape = SHAPE.model_copy(update={"state_size": 6, "state_tokens": 4})
    model, tokenizer = build_tiny_vla(shape, seed=1)
    params = SamplingParams(max_new_tokens=4, temperature=temperature)
    requests = [replace(request(model, tokenizer, index), params=params) for index in range(NUM)]
    done = serve(NativeEngine(model.eval(), config=NativeConfig(max_running=16, max_tokens=2048)), requests)
    drawn = [sample_of(done[one.owner.index], one.prompt_ids[: -shape.state_tokens]) for one in requests]
    config = TrainConfig(temperature=temperature)
    train = TrainEngine(build_tiny_vla(shape, seed=1)[0].eval(), loss=sft_loss, optimizer=OPTIMIZER, config=config)
    for sample, found in zip(drawn, train.logprobs(drawn), strict=True):
        np.testing.assert_allclose(found[sample.loss_mask], sample.logprobs[sample.loss_mask], atol=1e-5)
        assert (np.abs(sample.sampled_ids.view(np.float32)) < 1).all()


def test_a_resumed_engine_goes_on_bit_for_bit(tmp_path: Path) -> None:
    made, whole = engine(), engine()
    for key in range(4):
        whole.learn(context(whole), transitions(key))
    for key in range(2):
        made.learn(context(made), transitions(key))
    made.copy_to_host(None).write(tmp_path)
    resumed = engine()
    resumed.model.load_state_dict(made.model.state_dict())
    resumed.load_optimizer(tmp_path)
    for key in range(2, 4):
        resumed.learn(context(resumed), transitions(key))
    for name, tensor in whole._parts.tensors().items():
        assert torch.equal(tensor, resumed._parts.tensors()[name]), name
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_many_critics_with_a_drawn_pair_learn_a_value() -> None:
    """REDQ's settings: the value of a constant reward that ends the task is the reward."""
    made = engine(num_critics=5, target_critics=2, layer_norm=True, policy_every=4)
    batch = transitions(0)
    batch = TransitionBatch(
        states=batch.states,
        actions=batch.actions,
        rewards=np.full(BATCH, 2, np.float32),
        next_states=batch.next_states,
        discounts=np.zeros(BATCH, np.float32),
    )
    for _ in range(200):
        made.learn(context(made), batch)
    found = made.collect_learned_metrics()
    assert found["off_policy/target"] == pytest.approx(2)
    made.learn(context(made), batch)
    assert made.collect_learned_metrics()["off_policy/value"] == pytest.approx(2, abs=0.05)


def test_a_divergence_ends_the_run_with_a_reason() -> None:
    made = engine()
    batch = transitions(0)
    broken = TransitionBatch(
        states=batch.states,
        actions=batch.actions,
        rewards=np.full(BATCH, np.nan, np.float32),
        next_states=batch.next_states,
        discounts=batch.discounts,
    )
    made.learn(context(made), broken)
    with pytest.raises(InterlaceError, match="diverged"):
        made.collect_learned_metrics()


def test_another_head_is_refused() -> None:
    with pytest.raises(UserError, match="head=squashed"):
        engine(shape=SHAPE.model_copy(update={"head": "gaussian"}))


def test_crossq_normalises_current_and_next_states_together() -> None:
    """The critics' targets come from the same pass, by the statistics of both halves (arXiv 1902.05605)."""
    made = engine(batch_norm=True, critic_betas=[0.5, 0.999])
    batch = transitions(0)
    assert made.targets is made.critics and not any(name.startswith("targets") for name in made._parts.tensors())
    states, actions, following = (torch.from_numpy(each) for each in (batch.states, batch.actions, batch.next_states))
    with torch.no_grad():
        drawn, logprobs = made.act(made._row(context(made), BATCH), following, noises(made, 3)[0])
        rows = torch.cat([torch.cat([states, actions], 1), torch.cat([following, drawn], 1)])
        values = []
        for place in range(2):
            found = rows
            for number in range(3):
                norm = nn.BatchNorm1d(found.shape[1], eps=1e-3)
                found = F.linear(
                    norm(found), made.critics.weights[number][place].T, made.critics.biases[number][place, 0]
                )
                found = torch.relu(found) if number < 2 else found
            values.append(found[:, 0])
        both = torch.stack(values)
        wanted = torch.from_numpy(batch.rewards) + torch.from_numpy(batch.discounts) * (
            both[:, BATCH:].min(0).values - logprobs
        )
        loss = 0.5 * ((both[:, :BATCH] - wanted) ** 2).mean(1).sum()
    before = [each.clone() for each in made.critics.parameters()]
    made.learn(context(made), batch)
    found = made.collect_learned_metrics()
    assert found["off_policy/critic_loss"] == pytest.approx(float(loss), rel=1e-4)
    mean = made.critics.norms[0].mean[0, 0]
    torch.testing.assert_close(mean, 0.01 * rows.mean(0), atol=1e-6, rtol=1e-4)
    assert any(not torch.equal(own, old) for own, old in zip(made.critics.parameters(), before, strict=True))


def test_a_resumed_crossq_has_the_same_statistics(tmp_path: Path) -> None:
    made, resumed = engine(batch_norm=True), engine(batch_norm=True)
    made.learn(context(made), transitions(0))
    made.copy_to_host(None).write(tmp_path)
    resumed.model.load_state_dict(made.model.state_dict())
    resumed.load_optimizer(tmp_path)
    for each in (made, resumed):
        each.learn(context(each), transitions(1))
    for name, tensor in made._parts.tensors().items():
        assert torch.equal(tensor, resumed._parts.tensors()[name]), name


def test_weights_scale_the_errors_of_the_critics() -> None:
    made, twice = engine(), engine()
    batch = transitions(0)
    made.learn(context(made), batch)
    twice.learn(context(twice), batch, np.full(BATCH, 2, np.float32))
    losses = [each.collect_learned_metrics()["off_policy/critic_loss"] for each in (made, twice)]
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-5)
    np.testing.assert_array_equal(made.last_errors(), twice.last_errors())
    assert made.last_errors().shape == (BATCH,) and (made.last_errors() > 0).all()


def test_two_normalisations_are_refused() -> None:
    with pytest.raises(UserError, match="batch_norm and layer_norm"):
        engine(batch_norm=True, layer_norm=True)


def backpropagate(made: ActorCriticEngine, row: ContextRow) -> list[torch.Tensor]:
    """Returns the policy's outputs and the gradients of all its parameters, each divided by its largest number."""
    outputs = made.outputs(row, torch.from_numpy(transitions(0).states))
    (outputs * torch.arange(outputs.numel()).view(outputs.shape)).sum().backward()
    found = [outputs.detach(), *(each.grad for each in made.model.parameters() if each.grad is not None)]
    made.model.zero_grad(set_to_none=True)
    return [each / each.abs().max() for each in found]


@pytest.mark.parametrize("layers", [1, 2])
def test_rows_that_nothing_reads_change_no_output_and_no_gradient(layers: int) -> None:
    """The last layer computes the answers' rows alone; a body of another kind is run whole."""
    made = engine(shape=SHAPE.model_copy(update={"layers": layers}))
    row = replace(made._row(context(made), BATCH), shared=None)
    found = []
    for alone in (True, False):
        made._reads_answers_alone = alone
        found.append(backpropagate(made, row))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert reads_answers_alone(made.model)
    made.model.base_model.gradient_checkpointing = True
    assert not reads_answers_alone(made.model)


@pytest.mark.parametrize(("state_tokens", "chunk"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_one_layer_computes_the_common_tokens_once(state_tokens: int, chunk: int, key_value_heads: int) -> None:
    """Outputs and gradients equal the packed row's, in which each context has its own query tokens."""
    made = engine(shape=SHAPE.model_copy(update={"layers": 1, "state_tokens": state_tokens, "chunk": chunk}))
    attention = made.model.base_model.layers[0].self_attn
    for layer in (attention.k_proj, attention.v_proj):  # fewer heads than the queries'
        layer.weight.data, layer.bias.data = layer.weight[: 16 * key_value_heads], layer.bias[: 16 * key_value_heads]
    attention.num_key_value_groups = 4 // key_value_heads
    placeholders = [made.model.config.placeholder_token_id] * state_tokens
    row = made._row(np.array([300, 301, 302, *placeholders], np.int32), BATCH)
    assert row.shared is not None
    found = [backpropagate(made, each) for each in (row, replace(row, shared=None))]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    attention.sliding_window = 2
    assert not has_one_layer(made.model)


def test_other_attention_and_varying_rotations_are_computed_whole() -> None:
    """Rotations were kept that belong to the longest sequence so far, and norms of queries were left out."""
    body = engine(shape=SHAPE.model_copy(update={"layers": 1})).model.base_model
    attention = body.layers[0].self_attn
    assert has_one_layer(body)
    body.rotary_emb.rope_type = "dynamic"
    assert not has_one_layer(body)
    body.rotary_emb.rope_type = "llama3"
    assert has_one_layer(body)
    attention.__class__ = type("NormedAttention", (type(attention),), {})
    assert not has_one_layer(body)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_placeholder_inside_an_instruction_is_refused(layers: int) -> None:
    """A policy of one layer read other tokens in place of its queries."""
    made = engine(shape=SHAPE.model_copy(update={"layers": layers}))
    first, *others = context(made).tolist()
    with pytest.raises(UserError, match=r"at tokens \[0, 4, 5\] of 6"):
        made.learn(np.array([others[-1], first, *others], np.int32), transitions(0))
