"""Samples laid out as micro-batches: one row of tokens, sample after sample, no padding, each prompt once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from pydantic import Field

from interlace.core.config import Config
from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.engines.train.attention import PackedLayout
from interlace.engines.train.prefetch import on_device

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from interlace.core.types import BoolArray, FloatArray, IntArray

    Places = NDArray[np.int64]
    """Of a sample's tokens, flat."""


class PackingConfig(Config):
    """How much is computed at once, and by what. Changes memory and speed, and at most the last bits of a result."""

    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Prompt and response tokens of one forward, a prompt that samples share counted once, or padding counted where
    rows are padded; a longer sample has one to itself."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward: less memory, about a third more time."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    liger: bool = False
    """Use Liger's kernels."""
    reshard: bool = True
    """Of several ranks: give each layer's weights up right after its use. False keeps whole weights and a whole
    gradient from a minibatch's first forward to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The tokens of some samples, ready for one forward. T = response tokens asked for, over all samples.

    A sample's tokens are its prompt and its response without the last one, whose logits nobody reads.
    """

    input_ids: Tensor
    """[1, row length] packed, or [samples, longest] padded on the right."""
    position_ids: Tensor
    """As input_ids; starts at 0 for each sample."""
    attention_mask: Tensor | None
    """[samples, longest] where padded."""
    layout: PackedLayout | None
    """Where each sample lies, where packed; samples of one prompt have its tokens in common."""
    keep_T: Tensor
    """[T] flat positions whose output predicts the response tokens; samples of one prompt have the first in common."""
    targets_T: Tensor
    """[T] the response tokens."""
    sample_T: Tensor
    """[T] index of the sample a token belongs to, within this micro-batch."""
    lengths: tuple[int, ...]
    """[samples] tokens asked for, by sample."""

    @property
    def num_samples(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """What the samples of a micro-batch bring for each of its tokens, [T] each; None where no sample has it."""

    logprobs_T: Tensor | None
    proximal_logprobs_T: Tensor | None
    ref_logprobs_T: Tensor | None
    advantages_T: Tensor | None
    values_T: Tensor | None
    returns_T: Tensor | None


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: bins of indices whose lengths sum to at most `budget`, each bin longest first.

    A length above the budget gets a bin of its own. Ties keep their order, so the result depends on the input alone.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        slot = next((b for b, left in enumerate(room) if lengths[index] <= left), None)
        if slot is None:
            bins.append([index])
            room.append(budget - lengths[index])
        else:
            bins[slot].append(index)
            room[slot] -= lengths[index]
    return bins


def split_padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices, longest first, each with what its longest still fits: at most `budget` with the padding.

    A length above the budget gets a bin of its own. Ties keep their order.
    """
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if bins and lengths[bins[-1][0]] * (len(bins[-1]) + 1) <= budget:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def split_samples(samples: Sequence[Sample], budget: int, *, padded: bool) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens, as indices, longest first. Samples of one prompt stay together as far
    as they fit, so that it counts once, unless rows are padded, where each sample has its own and padding counts."""
    if padded:
        return split_padded([row_length(sample) for sample in samples], budget)
    by_prompt: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(sample.prompt.token_ids.tobytes(), []).append(index)
    parts, lengths = [], []
    for group in by_prompt.values():
        num_prompt_tokens = len(samples[group[0]].prompt.token_ids)
        own = [samples[index].num_tokens - 1 for index in group]
        for part in split_by_tokens(own, budget - num_prompt_tokens):
            parts.append([group[place] for place in part])
            lengths.append(num_prompt_tokens + sum(own[place] for place in part))
    whole = [[index for part in bin_ for index in parts[part]] for bin_ in split_by_tokens(lengths, budget)]
    return [sorted(indices, key=lambda index: (-row_length(samples[index]), index)) for indices in whole]


def placeholder() -> Sample:
    """One token to predict, from one: what an empty micro-batch computes."""
    token = np.zeros(1, np.int32)
    prompt = Prompt(uid="placeholder", token_ids=token, text="", answer="")
    return Sample(key=SampleKey(0, 0), prompt=prompt, segments=(Segment(token_ids=token),))


def row_length(sample: Sample) -> int:
    """Tokens that a sample costs in a forward."""
    return sample.num_total_tokens - 1


def collate(
    samples: Sequence[Sample], device: torch.device, *, padded: bool, masks: Sequence[BoolArray | None]
) -> MicroBatch:
    """Lays samples out in the given order (longest first, so that lengths are close to their neighbours').

    masks: which response tokens are asked for, by sample; None asks for all. Raises ValueError for an empty prompt.
    """
    rows = [_row(sample) for sample in samples]
    sizes = [len(row) for row in rows]
    attention_mask, layout = None, None
    if padded:
        places, shape = _padded_places(sizes), (len(rows), max(sizes))
        attention_mask = on_device(np.arange(max(sizes)) < np.array(sizes)[:, None], device, torch.long)
    else:
        places = _places(samples)
        shape = (1, 1 + max(int(place[-1]) for place in places))
        layout = PackedLayout.of(places, device)
    keep, targets, lengths = [], [], []
    for sample, place, mask in zip(samples, places, masks, strict=True):
        positions = place[len(sample.prompt.token_ids) - 1 :]
        keep.append(positions if mask is None else positions[mask])
        targets.append(sample.token_ids if mask is None else sample.token_ids[mask])
        lengths.append(len(targets[-1]))
    input_ids, position_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, place in zip(rows, places, strict=True):
        input_ids.flat[place], position_ids.flat[place] = row, np.arange(len(row))
    return MicroBatch(
        input_ids=on_device(input_ids, device, torch.long),
        position_ids=on_device(position_ids, device, torch.long),
        attention_mask=attention_mask,
        layout=layout,
        keep_T=on_device(np.concatenate(keep), device, torch.long),
        targets_T=on_device(np.concatenate(targets), device, torch.long),
        sample_T=on_device(np.repeat(np.arange(len(rows)), lengths), device),
        lengths=tuple(lengths),
    )


def read_columns(samples: Sequence[Sample], device: torch.device, masks: Sequence[BoolArray | None]) -> Columns:
    """The samples' columns at the tokens asked for.

    Raises ValueError where only some samples have one, or a sample one of another length.
    """

    def read(name: str, values: Sequence[FloatArray | None]) -> Tensor | None:
        present = [value for value in values if value is not None and len(value)]
        if not present:
            return None
        if len(present) < len(samples):
            missing = len(samples) - len(present)
            raise ValueError(f"{missing} of {len(samples)} samples have no {name}: all need it, or none")
        for sample, value in zip(samples, present, strict=True):
            if len(value) != sample.num_tokens:
                raise ValueError(f"sample {sample.key} has {sample.num_tokens} tokens and {len(value)} {name}")
        kept = [value if mask is None else value[mask] for value, mask in zip(present, masks, strict=True)]
        return on_device(np.concatenate(kept).astype(np.float32, copy=False), device)

    return Columns(
        logprobs_T=read("logprobs", [sample.logprobs for sample in samples]),
        proximal_logprobs_T=read("proximal_logprobs", [sample.proximal_logprobs for sample in samples]),
        ref_logprobs_T=read("ref_logprobs", [sample.ref_logprobs for sample in samples]),
        advantages_T=read("advantages", [sample.advantages for sample in samples]),
        values_T=read("values", [sample.values for sample in samples]),
        returns_T=read("returns", [sample.returns for sample in samples]),
    )


def _row(sample: Sample) -> IntArray:
    if not len(sample.prompt.token_ids):
        raise ValueError(f"sample {sample.key} has an empty prompt: its first token has nothing to be predicted from")
    return np.concatenate([sample.prompt.token_ids, sample.token_ids[:-1]])


def _places(samples: Sequence[Sample]) -> list[Places]:
    """Of each sample, where its tokens stand in a row that has each prompt once, before its first response."""
    prompts: dict[bytes, Places] = {}
    found: list[Places] = []
    reach = 0
    for sample in samples:
        key = sample.prompt.token_ids.tobytes()
        if key not in prompts:
            prompts[key] = np.arange(reach, reach + len(sample.prompt.token_ids))
            reach += len(prompts[key])
        own = np.arange(reach, reach + sample.num_tokens - 1)
        reach += len(own)
        found.append(np.concatenate([prompts[key], own]))
    return found


def _padded_places(sizes: Sequence[int]) -> list[Places]:
    return [np.arange(size) + index * max(sizes) for index, size in enumerate(sizes)]
