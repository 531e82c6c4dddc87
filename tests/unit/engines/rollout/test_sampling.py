"""Samples follow the stated softmax, and log-probs belong to this distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from interlace.core.types import NO_GROUP, Request, SampleKey, SamplingParams
from interlace.engines.rollout.sampling import Draw, KernelSampler, PlainSampler, TorchSampler, draw, draw_keyed_uniform
from interlace.engines.rollout.sequence import SequenceState, SequenceTable

DRAWS = 8000
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 0.3, 0.7])


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's chi-squared test."""
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    if not freedom:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)))


def expected_distribution(params: SamplingParams, generated: list[int]) -> torch.Tensor:
    """The definition, on the ten logits, in the order of vLLM's sampler."""
    logits = LOGITS.double().clone()
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {0, *generated}:
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(generated):
        logits[token] -= params.presence_penalty
    probs = (logits / params.temperature).softmax(-1)
    probs[probs < params.min_p * probs.max()] = 0
    probs /= probs.sum()
    if params.top_k:
        probs[probs < probs.sort(descending=True).values[params.top_k - 1]] = 0
        probs /= probs.sum()
    if params.top_p < 1:
        order = probs.argsort(descending=True)
        before = probs[order].cumsum(-1) - probs[order]
        probs[order[before >= params.top_p]] = 0
    return probs / probs.sum()


def table_of(params: SamplingParams, generated: list[int], rows: int, seed: int = 0) -> SequenceTable:
    table = SequenceTable(rows, seed)
    for index in range(rows):
        request = Request(uid="p", owner=SampleKey(NO_GROUP, index), prompt_ids=[0], params=params)
        sequence = SequenceState(request=request, arrival=index, limit=30, token_ids=[0, *generated])
        sequence.logprobs, sequence.versions = [0.0] * len(generated), [0] * len(generated)
        table.enter(sequence)
    return table


@pytest.mark.parametrize("sampler", [KernelSampler(), TorchSampler()], ids=["kernel", "torch"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=3),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.3, top_k=7, top_p=0.9, min_p=0.05),
        SamplingParams(top_p=0.8, min_p=0.2),
        SamplingParams(repetition_penalty=1.4),
        SamplingParams(presence_penalty=0.9),
        SamplingParams(logit_bias=((7, 3.0), (0, -2.0))),
        SamplingParams(temperature=0.9, top_p=0.85, repetition_penalty=1.2, presence_penalty=0.4),
    ],
)
def test_empirical_distribution(sampler: PlainSampler, params: SamplingParams) -> None:
    generated = [1, 3, 3]
    table = table_of(params, generated, rows=500)
    rows, counts, logprobs = np.arange(500), np.zeros(10), {}
    expected = expected_distribution(params, generated)
    for number in range(DRAWS // 500):
        logits = LOGITS.repeat(500, 1)
        table.noise_key[:] += np.uint64(number)  # a fresh request each, at the same place of its response
        tokens, found = draw(logits, Draw(rows, np.full(500, len(generated)), table), table, sampler)
        counts += np.bincount(tokens, minlength=10)
        logprobs |= dict(zip(tokens.tolist(), found.tolist(), strict=True))
    possible = expected.numpy() > 0
    assert counts[~possible].sum() == 0
    assert p_value(counts[possible], expected.numpy()[possible] * counts.sum()) > 1e-4
    for token, logprob in logprobs.items():
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)


@given(st.integers(0, 2**63), st.integers(0, 10**6))
def test_noise_is_a_function_of_key_and_position(key: int, position: int) -> None:
    keys, positions = np.asarray([key, key ^ 1, key], np.uint64), np.asarray([position, position, position + 1])
    together = draw_keyed_uniform(keys, positions)
    assert together[0] == draw_keyed_uniform(keys[:1], positions[:1])[0]
    assert ((together > 0) & (together < 1)).all() and len(set(together)) == 3


def test_noise_is_uniform_along_positions_and_keys() -> None:
    along = draw_keyed_uniform(np.full(20000, 12345, np.uint64), np.arange(20000))
    across = draw_keyed_uniform(np.arange(20000, dtype=np.uint64), np.full(20000, 3))
    for noise in (along, across):
        counts = np.histogram(noise, bins=50, range=(0, 1))[0]
        assert p_value(counts, np.full(50, len(noise) / 50)) > 1e-4
    assert abs(np.corrcoef(along[1:], along[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.999])
def test_truncation_beyond_the_first_candidates(top_p: float) -> None:
    """A flat distribution over 1,000 tokens: the first 256 hold too little, the whole vocabulary is looked at."""
    torch.manual_seed(0)
    logits = torch.randn(64, 1000) * 0.1
    table = table_of(SamplingParams(top_p=top_p), [], rows=64)
    tokens, logprobs = draw(logits.clone(), Draw(np.arange(64), np.zeros(64, np.int64), table), table, TorchSampler())
    for row in range(64):
        probs, order = logits[row].double().softmax(-1).sort(descending=True)
        kept = int((probs.cumsum(-1) - probs < top_p).sum())
        assert tokens[row] in order[:kept]
        share = logits[row].double().softmax(-1)[tokens[row]] / probs[:kept].sum()
        assert logprobs[row] == pytest.approx(math.log(share), abs=1e-5)


@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.05, 3),
    st.sampled_from([0, 1, 40, 256, 257, 700, 1000, 2000]),
    st.floats(0.05, 1),
    st.one_of(st.just(0.0), st.floats(0, 0.9)),
)
def test_all_truncations_together_follow_vllms_order(
    seed: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    """With a vocabulary that is larger than the first candidates."""
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    table = table_of(params, [], rows=8, seed=seed % 1000)
    wanted = Draw(np.arange(8), np.zeros(8, np.int64), table)
    tokens, logprobs = draw(logits.float(), wanted, table, TorchSampler())
    for row, token, logprob in zip(logits.float().double(), tokens, logprobs, strict=True):
        probs, order = row.softmax(-1).sort(descending=True)
        kept = probs * (probs >= min_p * probs[0]) * (torch.arange(1000) < (top_k or 1000))
        share = kept / kept.sum()
        before = share.cumsum(-1) - share
        gaps = torch.cat([probs / probs[0] - min_p, before - top_p]).abs()
        assume(gaps.min() > 1e-6)  # the last bits decide
        share = share * ((before < top_p) | (top_p >= 1))
        own = float((share / share.sum())[order == int(token)])
        assert own > 0 and logprob == pytest.approx(math.log(own), abs=1e-4)


@pytest.mark.parametrize("vocab", [7, 64, 65, 1003])
def test_kernel_agrees_with_torch(vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, vocab) * 3
    temperature = np.linspace(0, 2, 200, dtype=np.float32)
    uniform = draw_keyed_uniform(np.arange(200, dtype=np.uint64), np.zeros(200, np.int64))
    ours, theirs = (sampler.draw(logits, temperature, uniform) for sampler in (KernelSampler(), TorchSampler()))
    assert (ours[0] == theirs[0]).mean() > 0.98, "only ties within rounding may differ"
    same = ours[0] == theirs[0]
    np.testing.assert_allclose(ours[1][same], theirs[1][same], atol=2e-6)


def test_a_forbidden_token_is_never_drawn() -> None:
    params = SamplingParams(logit_bias=((0, float("-inf")), (1, float("-inf"))))
    table = table_of(params, [], rows=400)
    tokens, _ = draw(
        LOGITS.repeat(400, 1), Draw(np.arange(400), np.zeros(400, np.int64), table), table, KernelSampler()
    )
    assert not np.isin(tokens, [0, 1]).any()
