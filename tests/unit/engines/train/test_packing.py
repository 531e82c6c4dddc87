"""Micro-batches contain every sample once, with little padding."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.engines.train.attention import PackedLayout
from interlace.engines.train.packing import collate, split_by_tokens, split_samples
from tests.unit.engines.train.models import ragged_samples

CPU = torch.device("cpu")


@given(lengths=st.lists(st.integers(1, 100), max_size=40), budget=st.integers(1, 200))
def test_bins(lengths: list[int], budget: int) -> None:
    bins = split_by_tokens(lengths, budget)
    assert sorted(index for rows in bins for index in rows) == list(range(len(lengths)))
    for rows in bins:
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= budget
        assert [lengths[row] for row in rows] == sorted((lengths[row] for row in rows), reverse=True)
    totals = [sum(lengths[row] for row in rows) for rows in bins]
    assert sum(total <= budget / 2 for total in totals) <= 1  # first fit: two half-empty bins would have been one


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_the_blocks_of_a_layout_tile_the_row(sizes: list[int]) -> None:
    sizes.sort(reverse=True)
    layout = PackedLayout.of(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]), CPU)
    assert layout.blocks[0].start == 0 and layout.blocks[-1].stop == sum(sizes)
    assert all(one.stop == other.start for one, other in zip(layout.blocks, layout.blocks[1:], strict=False))
    for block in layout.blocks:
        if block.to_dense is None or block.to_row is None:
            assert block.stop - block.start == block.num_sequences * block.length
        else:
            back = block.to_dense[block.to_row]  # a token's dense slot holds that token
            assert back.tolist() == list(range(block.stop - block.start))


def test_a_row_is_a_prompt_and_its_responses_without_their_last_token() -> None:
    prompt = Prompt(uid="p", token_ids=np.array([5, 6], np.int32), text="", answer="")
    samples = [
        Sample(key=SampleKey(0, 0), prompt=prompt, segments=(Segment(token_ids=np.array([7, 8, 9], np.int32)),)),
        Sample(key=SampleKey(0, 1), prompt=prompt, segments=(Segment(token_ids=np.array([4, 3], np.int32)),)),
    ]
    masks = [np.array([True, False, True]), None]
    batch = collate(samples, CPU, padded=False, masks=masks)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.keep_T.tolist() == [1, 3, 1, 4] and batch.targets_T.tolist() == [7, 9, 4, 3]
    assert batch.sample_T.tolist() == [0, 0, 1, 1] and batch.lengths == (2, 2)
    padded = collate(samples, CPU, padded=True, masks=masks)
    assert padded.input_ids.tolist() == [[5, 6, 7, 8], [5, 6, 4, 0]]
    assert padded.attention_mask is not None and padded.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert padded.keep_T.tolist() == [1, 3, 5, 6]


def test_packed_rows_hold_each_prompt_once_and_no_padding() -> None:
    samples = ragged_samples(9)
    batch = collate(samples, CPU, padded=False, masks=[None] * 9)
    prompts = {sample.prompt.uid: len(sample.prompt.token_ids) for sample in samples}
    assert batch.input_ids.numel() == sum(prompts.values()) + sum(sample.num_tokens - 1 for sample in samples)
    assert batch.num_samples == 9 and len(prompts) == 5


@given(count=st.integers(1, 24), seed=st.integers(0, 9), budget=st.integers(1, 200), padded=st.booleans())
def test_micro_batches_keep_to_the_budget_and_samples_of_a_prompt_together(
    count: int, seed: int, budget: int, padded: bool
) -> None:
    samples = ragged_samples(count, seed)
    split = split_samples(samples, budget, padded=padded)
    assert sorted(index for rows in split for index in rows) == list(range(count))
    for rows in split:
        chosen = [samples[row] for row in rows]
        totals = [sample.num_total_tokens for sample in chosen]
        assert totals == sorted(totals, reverse=True)
        batch = collate(chosen, CPU, padded=padded, masks=[None] * len(rows))
        assert len(rows) == 1 or batch.input_ids.numel() <= budget
    groups = Counter((place, samples[row].prompt.uid) for place, rows in enumerate(split) for row in rows)
    if not padded and budget >= 3 * 29:  # a prompt of eight and three responses of at most twenty tokens fit
        assert len(groups) == len({sample.prompt.uid for sample in samples})


def test_an_empty_prompt_is_refused() -> None:
    empty = Prompt(uid="p", token_ids=np.zeros(0, np.int32), text="", answer="")
    sample = Sample(key=SampleKey(3, 1), prompt=empty, segments=(Segment(token_ids=np.array([4], np.int32)),))
    with pytest.raises(ValueError, match="empty prompt"):
        collate([sample], CPU, padded=False, masks=[None])
