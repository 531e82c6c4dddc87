"""Losses of whole minibatches equal the published formulas, computed sequence by sequence in float64.

The settings of an algorithm, the lengths, and the split of a minibatch into micro-batches are drawn at random.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from interlace.algorithms import create_algorithm
from interlace.core.training import LossInputs
from interlace.engines.train.engine import Aggregator

CONSTANT = 11
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")


@dataclass(frozen=True, kw_only=True)
class Response:
    """Log-probs [L] of one response under four policies, its entropies [L], and its advantage."""

    new: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    entropy: Tensor
    advantage: Tensor


def draw_responses(seed: int, lengths: Sequence[int]) -> list[Response]:
    draw = torch.Generator().manual_seed(seed)

    def noise(length: int, scale: float) -> Tensor:
        return scale * torch.randn(length, generator=draw, dtype=torch.float64)

    found = []
    for length in lengths:
        behaviour = -torch.rand(length, generator=draw, dtype=torch.float64) * 3 - 0.1
        old = behaviour + noise(length, 0.3)
        found.append(
            Response(
                new=(old + noise(length, 0.4)).requires_grad_(),
                old=old,
                behaviour=behaviour,
                reference=behaviour + noise(length, 0.5),
                entropy=noise(length, 1.0).abs(),
                advantage=noise(1, 1.5)[0],
            )
        )
    return found


def make_inputs(responses: Sequence[Response], *, recomputes: bool) -> LossInputs:
    """Lays responses out as one micro-batch. recomputes: whether the old policy differs from the one that sampled."""
    lengths = torch.tensor([len(each.new) for each in responses])
    behaviour_T = torch.cat([each.behaviour for each in responses])
    return LossInputs(
        logprobs_T=torch.cat([each.new for each in responses]),
        entropy_T=torch.cat([each.entropy for each in responses]),
        behaviour_logprobs_T=behaviour_T,
        proximal_logprobs_T=torch.cat([each.old for each in responses]) if recomputes else behaviour_T,
        advantages_T=torch.stack([each.advantage for each in responses]).repeat_interleave(lengths),
        ref_logprobs_T=torch.cat([each.reference for each in responses]),
        mask_T=torch.ones(int(lengths.sum()), dtype=torch.bool),
        sample_T=torch.arange(len(responses)).repeat_interleave(lengths),
        num_samples=len(responses),
    )


def accumulated(
    name: str, settings: Mapping[str, object], microbatches: Sequence[Sequence[Response]], *, recomputes: bool
) -> Tensor:
    """The loss of a minibatch as the train engine accumulates it: sums of micro-batches and of their denominators."""
    algorithm = create_algorithm(name, settings)
    aggregator = Aggregator(aggregation=algorithm.settings.aggregation, aggregation_length=CONSTANT)
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for responses in microbatches:
        lengths = [len(each.new) for each in responses]
        weights_T = aggregator.weights(lengths, torch.device("cpu"))
        loss_T = algorithm.loss(make_inputs(responses, recomputes=recomputes)).loss_T
        total = total + (loss_T if weights_T is None else loss_T * weights_T).sum()
        denominator += aggregator.denominator(lengths)
    return total / denominator


def reduced(losses: Sequence[Tensor], aggregation: str) -> Tensor:
    """The published reductions of the losses [L] of all responses of a minibatch; empty responses have no part."""
    losses = [each for each in losses if len(each)]
    match aggregation:
        case "token_mean":  # DAPO (arXiv 2503.14476), eq. 8
            return torch.cat([*losses]).mean()
        case "seq_mean_token_mean":  # GRPO (arXiv 2402.03300), eq. 3
            return torch.stack([each.mean() for each in losses]).mean()
        case "seq_mean_token_sum":
            return torch.stack([each.sum() for each in losses]).mean()
        case _:  # Dr. GRPO (arXiv 2503.20783), with its constant length
            return torch.stack([each.sum() / CONSTANT for each in losses]).mean()


def assert_same(found: Tensor, expected: Tensor, responses: Sequence[Response]) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    tensors = [each.new for each in responses if len(each.new)]
    for ours, theirs in zip(torch.autograd.grad(found, tensors), torch.autograd.grad(expected, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def clipped(each: Response, old: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    """PPO's loss (arXiv 1707.06347, eq. 7) with DAPO's two bounds; dual clip: arXiv 1912.09729, eq. 5."""
    ratio = (each.new - old).exp()
    objective = torch.minimum(ratio * each.advantage, ratio.clamp(1 - low, 1 + high) * each.advantage)
    if dual is not None and each.advantage < 0:
        objective = torch.maximum(objective, dual * each.advantage)
    return -objective


KL: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "k2": lambda d: (d**2 / 2, d**2 / 2),
    "k3": lambda d: (d.exp() - 1 - d, d.exp() - 1 - d),
    "k3+": lambda d: (d.exp() - 1 - d, d**2 / 2),
}
"""Value of the estimate from d = log reference - log policy, and the term with its gradient (Schulman 2020)."""


def divergence(each: Response, estimator: str) -> Tensor:
    value, slope = KL[estimator](each.reference - each.new)
    return value.detach() + slope - slope.detach()


@st.composite
def minibatches(draw: st.DrawFn) -> list[list[Response]]:
    """Responses in micro-batches; some responses are empty, and the last micro-batch may be small."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    lengths = draw(st.lists(st.integers(0, 6), min_size=sum(sizes), max_size=sum(sizes)).filter(any))
    responses = iter(draw_responses(draw(st.integers(0, 2**31)), lengths))
    return [[next(responses) for _ in range(size)] for size in sizes]


BOUNDS = st.floats(0.01, 0.6)


@given(
    minibatches(), st.sampled_from(AGGREGATIONS), BOUNDS, BOUNDS, st.one_of(st.none(), st.floats(1.2, 4)),
    st.sampled_from(["", *KL]), st.sampled_from(["", "truncate", "mask", "weight"]),
    st.sampled_from(["token", "sequence", "geometric"]),
)  # fmt: skip
def test_the_clipped_loss_with_kl_and_corrections_is_the_published_one(
    microbatches: list[list[Response]],
    aggregation: str,
    low: float,
    high: float,
    dual: float | None,
    estimator: str,
    correction: str,
    level: str,
) -> None:
    settings: dict[str, object] = {
        "aggregation": aggregation, "clip_low": low, "clip_high": high, "dual_clip": dual, "entropy_coefficient": 0.02
    }  # fmt: skip
    if estimator:
        settings |= {"kl_coefficient": 0.3, "kl_estimator": estimator}
    if correction:
        bounds = {} if correction == "weight" else {"low": 0.8, "high": 1.3}
        settings["off_policy"] = {"proximal": "recomputed", "correction": correction, "level": level, **bounds}
    losses = []
    responses = [each for batch in microbatches for each in batch]
    for each in responses:
        old = each.old if correction else each.behaviour
        loss = clipped(each, old, low, high, dual)
        if correction and len(each.new):
            gap = each.old - each.behaviour
            ratio = {"token": gap, "sequence": gap.sum().expand_as(gap), "geometric": gap.mean().expand_as(gap)}[level]
            ratio = ratio.exp()
            is_inside = (ratio >= 0.8) & (ratio <= 1.3)
            loss = loss * {"weight": ratio, "truncate": ratio.clamp(0.8, 1.3), "mask": ratio * is_inside}[correction]
        if estimator:
            loss = loss + 0.3 * divergence(each, estimator)
        losses.append(loss - 0.02 * each.entropy)
    found = accumulated("grpo", settings, microbatches, recomputes=bool(correction))
    assert_same(found, reduced(losses, aggregation), responses)


@given(minibatches(), BOUNDS, BOUNDS, st.one_of(st.none(), st.floats(1.2, 4)))
def test_gspo_clips_the_ratio_of_a_sequence(
    microbatches: list[list[Response]], low: float, high: float, dual: float | None
) -> None:
    """arXiv 2507.18071, eq. 5 and 7: the mean over sequences, each with one ratio."""
    responses = [each for batch in microbatches for each in batch]
    losses = []
    for each in responses:
        if not len(each.new):
            continue
        ratio = (each.new - each.behaviour).mean().exp()
        objective = torch.minimum(ratio * each.advantage, ratio.clamp(1 - low, 1 + high) * each.advantage)
        if dual is not None and each.advantage < 0:
            objective = torch.maximum(objective, dual * each.advantage)
        losses.append(-objective)
    found = accumulated("gspo", {"clip_low": low, "clip_high": high, "dual_clip": dual}, microbatches, recomputes=False)
    assert_same(found, torch.stack(losses).mean(), responses)


@given(minibatches(), st.sampled_from(AGGREGATIONS), st.floats(0, 1), st.floats(0.01, 3))
def test_cispo_bounds_the_weights(
    microbatches: list[list[Response]], aggregation: str, low: float, high: float
) -> None:
    """arXiv 2506.13585, eq. 4 and 5."""
    responses = [each for batch in microbatches for each in batch]
    losses = [
        -(each.new - each.behaviour).exp().clamp(1 - low, 1 + high).detach() * each.advantage * each.new
        for each in responses
    ]
    settings = {"aggregation": aggregation, "clip_low": low, "clip_high": high}
    found = accumulated("cispo", settings, microbatches, recomputes=False)
    assert_same(found, reduced(losses, aggregation), responses)


@given(minibatches(), st.floats(0.5, 1), st.floats(1, 2), st.sampled_from(["token", "sequence", "geometric"]))
def test_without_a_separate_policy_a_mask_reads_the_current_ratio(
    microbatches: list[list[Response]], low: float, high: float, level: str
) -> None:
    """IcePop by token; by the geometric mean, sequence masking. A masked token still counts in the denominator."""
    if low >= high:
        return
    responses = [each for batch in microbatches for each in batch]
    losses = []
    for each in responses:
        gap = (each.new - each.behaviour).detach()
        if level != "token" and len(gap):
            gap = (gap.sum() if level == "sequence" else gap.mean()).expand_as(gap)
        is_inside = (gap.exp() >= low) & (gap.exp() <= high)
        losses.append(clipped(each, each.behaviour, 0.2, 0.28, None) * is_inside)
    settings = {"off_policy": {"correction": "mask", "low": low, "high": high, "level": level}}
    found = accumulated("dapo", settings, microbatches, recomputes=False)
    assert_same(found, reduced(losses, "token_mean"), responses)
