"""IQL and AWR: one update against plain torch, learned values, resume, and heads."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from interlace.algorithms import create_algorithm
from interlace.core.errors import UserError
from interlace.core.transitions import TransitionBatch
from interlace.engines.train.advantage_weighted import AdvantageWeightedEngine, ImplicitQEngine
from interlace.engines.train.config import TrainConfig
from interlace.engines.train.ensemble import Ensemble
from interlace.models.config import RobotShape
from interlace.robots.models.vla import build_tiny_vla
from tests.unit.engines.test_actor_critic import OPTIMIZER, SHAPE, context, transitions

KINDS = {"iql": ImplicitQEngine, "awr": AdvantageWeightedEngine}


def engine(name: str, head: str = "gaussian", **settings: object) -> ImplicitQEngine | AdvantageWeightedEngine:
    small = {"critic_width": 16, "critic_lr": 3e-3, **settings}
    model = build_tiny_vla(shape_of(head), seed=1)[0]
    algorithm = create_algorithm(name, small)
    return KINDS[name](model, algorithm=algorithm, optimizer=OPTIMIZER, config=TrainConfig(), seed=3)


def shape_of(head: str) -> RobotShape:
    return SHAPE.model_copy(update={"head": head})


def networks(ensemble: Ensemble) -> list[nn.Sequential]:
    """The networks of an ensemble as layers of torch."""
    found = []
    for place in range(len(ensemble.weights[0])):
        layers: list[nn.Module] = []
        for weight, bias in zip(ensemble.weights, ensemble.biases, strict=True):
            layer = nn.Linear(*weight.shape[1:])
            layer.load_state_dict({"weight": weight[place].T.detach().clone(), "bias": bias[place, 0].detach().clone()})
            layers += [layer, nn.ReLU()]
        found.append(nn.Sequential(*layers[:-1]))
    return found


def log_density(model: nn.Module, ids: torch.Tensor, batch: TransitionBatch) -> torch.Tensor:
    """Log-probs of the recorded chunks, by transformers' attention and torch's normal distribution."""
    rows = ids.repeat(len(batch), 1)
    places = torch.nonzero(rows.flatten() == model.config.placeholder_token_id)[:, 0]
    outputs = model(input_ids=rows, inputs={"state": torch.from_numpy(batch.states)}, input_places=places).logits
    mean, log_std = outputs[:, -4:].unbind(-1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
    return normal.log_prob(torch.from_numpy(batch.actions)).sum(1)


def check_policy(
    made: ImplicitQEngine | AdvantageWeightedEngine, weights: torch.Tensor, batch: TransitionBatch
) -> None:
    """Compares the policy after one update with plain torch's after a step on the weighted likelihood."""
    plain = build_tiny_vla(shape_of("gaussian"), seed=1)[0]
    adam = torch.optim.Adam(plain.parameters(), lr=1e-3)
    ids = torch.tensor([[*context(made), *plain.config.query_token_ids]])
    (-(weights * log_density(plain, ids, batch)).mean()).backward()
    adam.step()
    for (name, own), theirs in zip(made.model.named_parameters(), plain.parameters(), strict=True):
        # A gradient near 0 may have either sign, and Adam's first step has the size of the learning rate.
        off = (own - theirs).abs() > 5e-5
        assert off.float().mean() < 0.01, name


def test_an_update_of_iql_is_the_paper_s() -> None:
    made = engine("iql", expectile=0.8, inverse_temperature=2.0, max_weight=1.5, tau=0.1)
    batch = transitions(0)
    states, actions, rewards, following, discounts = (
        torch.from_numpy(each)
        for each in (batch.states, batch.actions, batch.rewards, batch.next_states, batch.discounts)
    )
    critics, targets = networks(made.critics), networks(made.targets)
    [value] = networks(made.value)
    given = torch.cat([states, actions], 1)
    with torch.no_grad():
        q = torch.minimum(targets[0](given)[:, 0], targets[1](given)[:, 0])
    value_adam = torch.optim.Adam(value.parameters(), lr=3e-3)
    gap = q - value(states)[:, 0]
    torch.where(gap < 0, 0.2 * gap**2, 0.8 * gap**2).mean().backward()
    value_adam.step()
    with torch.no_grad():
        weights = torch.exp(2.0 * (q - value(states)[:, 0])).clamp(max=1.5)
        wanted = rewards + discounts * value(following)[:, 0]
    critic_adam = torch.optim.Adam(itertools.chain(*(each.parameters() for each in critics)), lr=3e-3)
    sum(0.5 * F.mse_loss(critic(given)[:, 0], wanted) for critic in critics).backward()
    critic_adam.step()

    made.learn(context(made), batch)
    for ours, theirs in ((made.value, [value]), (made.critics, critics)):
        for place, network in enumerate(theirs):
            for number, layer in enumerate(network[::2]):
                torch.testing.assert_close(ours.weights[number][place].T, layer.weight, atol=1e-5, rtol=1e-4)
    before, after = targets[0][0].weight, critics[0][0].weight
    torch.testing.assert_close(made.targets.weights[0][0].T, 0.9 * before + 0.1 * after, atol=1e-5, rtol=1e-4)
    check_policy(made, weights, batch)


def test_an_update_of_awr_is_the_paper_s() -> None:
    made = engine("awr", temperature=0.5, max_weight=3.0)
    batch = transitions(0)
    [value] = networks(made.value)
    states = torch.from_numpy(batch.states)
    with torch.no_grad():
        following = value(torch.from_numpy(batch.next_states))[:, 0]
        returns = torch.from_numpy(batch.rewards) + torch.from_numpy(batch.discounts) * following
        weights = torch.exp((returns - value(states)[:, 0]) / 0.5).clamp(max=3.0)
    adam = torch.optim.Adam(value.parameters(), lr=3e-3)
    (0.5 * F.mse_loss(value(states)[:, 0], returns)).backward()
    adam.step()
    made.learn(context(made), batch)
    for number, layer in enumerate(value[::2]):
        torch.testing.assert_close(made.value.weights[number][0].T, layer.weight, atol=1e-5, rtol=1e-4)
    check_policy(made, weights, batch)


def good_and_bad_actions() -> TransitionBatch:
    """Transitions of one state: half of the actions are 0.5 with reward 1, the others -0.5 with reward 0."""
    good = np.array([1, 0, 1, 0, 1, 0], np.float32)
    return TransitionBatch(
        states=np.ones((6, 5), np.float32),
        actions=np.repeat(good[:, None] - 0.5, 4, 1).astype(np.float32),
        rewards=good,
        next_states=np.ones((6, 5), np.float32),
        discounts=np.zeros(6, np.float32),
    )


def test_the_value_of_iql_is_the_expectile_of_the_data() -> None:
    """With rewards 0 and 1 in one state, an expectile of 0.9 satisfies 0.9 (1 - v) = 0.1 v."""
    made = engine("iql", expectile=0.9, tau=1.0, critic_lr=1e-2)
    batch = good_and_bad_actions()
    for _ in range(400):
        made.learn(context(made), batch)
    assert float(made.value(torch.ones(1, 5)).detach()) == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("name", ["iql", "awr"])
def test_a_policy_prefers_the_better_action(name: str) -> None:
    made = engine(name, critic_lr=1e-2, **({"inverse_temperature": 10.0} if name == "iql" else {"temperature": 0.1}))
    made.optimizer.config = OPTIMIZER.model_copy(update={"lr": 3e-3})
    batch = good_and_bad_actions()
    for _ in range(150):
        made.learn(context(made), batch)
    with torch.no_grad():
        mean = made.outputs(made._row(context(made), 1), torch.ones(1, 5))[:, 0]
    assert (mean > 0.35).all(), "the mean of the data is 0"


@pytest.mark.parametrize("name", ["iql", "awr"])
def test_a_resumed_engine_continues_bit_for_bit(tmp_path: Path, name: str) -> None:
    made, whole = engine(name, "squashed"), engine(name, "squashed")
    for key in range(4):
        whole.learn(context(whole), transitions(key))
    for key in range(2):
        made.learn(context(made), transitions(key))
    made.copy_to_host(None).write(tmp_path)
    resumed = engine(name, "squashed")
    resumed.model.load_state_dict(made.model.state_dict())
    resumed.load_optimizer(tmp_path)
    for key in range(2, 4):
        resumed.learn(context(resumed), transitions(key))
    for part, tensor in whole._parts.tensors().items():
        assert torch.equal(tensor, resumed._parts.tensors()[part]), part
    for part, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[part]), part


def test_a_head_without_a_density_of_numbers_is_refused() -> None:
    with pytest.raises(UserError, match="squashed or gaussian"):
        engine("iql", "tokens")
