"""The attention kernel computes attention, with results that depend on the sequence alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from interlace.engines.cpu import attention_kernel, compiled
from interlace.engines.cpu.attention_kernel import PackedSequences, attend
from interlace.engines.train import LogprobEngine, TrainConfig
from tests.unit.engines.train.models import ragged_samples, tiny_model

pytestmark = pytest.mark.skipif(not attention_kernel.is_available(), reason="no C++ compiler")
GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 70), min_size=1, max_size=3)), min_size=1, max_size=3
)
"""Of each prompt its length, and what each response to it adds."""


def places_of(groups: list[tuple[int, list[int]]]) -> tuple[list[np.ndarray], int]:
    """Of each response's sequence its places, in a row that has each prompt once; and the row's length."""
    found, reach = [], 0
    for prompt, responses in groups:
        common = np.arange(reach, reach + prompt)
        reach += prompt
        for response in responses:
            found.append(np.concatenate([common, np.arange(reach, reach + response)]))
            reach += response
    return found, reach


def formula(rows: Sequence[Tensor], places: list[np.ndarray], scale: float, window: int | None) -> Tensor:
    """[S, heads, dim] in the precision given; where a prompt is shared each sequence finds the same."""
    query, key, value = rows
    out = value.new_zeros(len(query), query.shape[1], value.shape[2])
    repeats = query.shape[1] // key.shape[1]
    for own in places:
        q, k, v = (each[own].transpose(0, 1) for each in (query, key, value))
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        sees = torch.ones(len(own), len(own), dtype=torch.bool).tril()
        sees = sees if window is None else sees.triu(1 - window)
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(~sees, -torch.inf).softmax(-1)
        out = out.index_put((torch.from_numpy(own),), (weights @ v).transpose(0, 1))
    return out


@given(
    groups=GROUPS,
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 1)]),
    dims=st.tuples(st.integers(1, 70), st.integers(1, 40)),
    window=st.none() | st.integers(1, 50),
    order=st.randoms(use_true_random=False),
)
def test_values_and_gradients_are_those_of_the_formula(groups, heads, dims, window, order) -> None:
    places, length = places_of(groups)
    order.shuffle(places)
    draw = torch.Generator().manual_seed(length)
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1]))
    *rows, gradient = [torch.randn(length, *shape, generator=draw) for shape in shapes]
    exact = [each.double().requires_grad_() for each in rows]
    expected = formula(exact, places, 0.3, window)
    expected.backward(gradient.double())
    ours = [each.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for each in rows]  # strides of a model's
    out = attend(*ours, sequences=PackedSequences.of(places), scale=0.3, window=window)
    out.backward(gradient)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours, exact, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-4, atol=1e-4)


@given(groups=GROUPS, window=st.none() | st.integers(1, 50), seed=st.integers(0, 9))
def test_bits_depend_neither_on_company_nor_on_threads(
    groups: list[tuple[int, list[int]]], window: int | None, seed: int
) -> None:
    places, length = places_of(groups)
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(length, heads, 8, generator=draw) for heads in (4, 2, 2)]

    def run(chosen: list[np.ndarray]) -> list[Tensor]:
        given_rows = [each.clone().requires_grad_() for each in rows]
        out = attend(*given_rows, sequences=PackedSequences.of(chosen), scale=0.4, window=window)
        asked = np.unique(np.concatenate(chosen))
        out[asked].square().sum().backward()
        return [each[asked] for each in (out, *(row.grad for row in given_rows if row.grad is not None))]

    before = torch.get_num_threads()
    together = run(places)
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, run(places), together))
    finally:
        torch.set_num_threads(before)
    first = [own for own in places if own[0] == places[0][0]]  # all that answer one prompt
    asked = np.unique(np.concatenate(first))
    assert all(torch.equal(alone, both[asked]) for alone, both in zip(run(first), together, strict=True))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """What was found out of the compiler."""
    attention_kernel.load.cache_clear()
    attention_kernel.is_available.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_processors_without_avx_512_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if " avx2 " not in compiled.processor():
        pytest.skip("no x86 processor with AVX2")
    flags = tuple("-march=haswell" if flag == "-march=native" else flag for flag in compiled.FLAGS)
    monkeypatch.setattr(compiled, "FLAGS", flags)
    test_values_and_gradients_are_those_of_the_formula()


def test_without_a_compiler_an_engine_computes_the_same(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, config = ragged_samples(9), TrainConfig(tokens_per_microbatch=60)
    expected = LogprobEngine(tiny_model(), config=config).logprobs(samples)
    forget()
    monkeypatch.setenv("PATH", str(fresh))
    assert not attention_kernel.is_available()
    for one, other in zip(LogprobEngine(tiny_model(), config=config).logprobs(samples), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
