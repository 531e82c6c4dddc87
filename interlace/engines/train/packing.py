"""Samples laid out as micro-batches: one row of tokens without padding, in which shared tokens appear once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from interlace.core.types import BoolArray, FloatArray, Prompt, Sample, SampleKey, Segment
from interlace.engines.train.attention import PackedLayout
from interlace.engines.train.prefetch import on_device
from interlace.engines.train.row_share import RowShare
from interlace.engines.train.trie import Places, Trie, branch_lengths, num_own_tokens, num_prompt_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenArrays:
    """Arrays whose embeddings replace placeholder tokens."""

    arrays: Mapping[str, Tensor]
    """[N, ...] each, for N observations."""
    places_P: Tensor
    """[P] flat positions of the placeholders, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeAnswers:
    """All tokens of answers of which only some are selected, for a head whose outputs depend on whole answers.

    A = tokens of these answers.
    """

    keep_A: Tensor
    """[A] as MicroBatch.keep_T."""
    targets_A: Tensor
    """[A] the response tokens."""
    selected_T: Tensor
    """[T] indices of the selected tokens among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Tokens of some samples, ready for one forward pass. T = selected response tokens of all samples.

    The tokens of a sample are its prompt and its segments, without the last token of each leaf, whose logits are not
    read.
    """

    input_ids: Tensor
    """[1, row length] packed, or [branches, longest] padded on the right."""
    position_ids: Tensor
    """Positions in the shape of input_ids; each branch starts at 0."""
    attention_mask: Tensor | None
    """[branches, longest] if rows are padded, else None."""
    given: GivenArrays | None
    """Arrays given in addition to the tokens; None if no sample has any."""
    layout: PackedLayout | None
    """Places of the branches if rows are packed; branches share the places of a common prefix."""
    keep_T: Tensor
    """[T] flat positions whose output predicts the response tokens; tokens that follow one token share its position."""
    targets_T: Tensor
    """[T] the response tokens."""
    sample_T: Tensor
    """[T] index, within this micro-batch, of the sample a token belongs to."""
    turn_T: Tensor
    """[T] index, within this micro-batch, of the segment a token belongs to."""
    lengths: tuple[int, ...]
    """[samples] selected tokens of each sample."""
    share: RowShare | None = None
    """This rank's part of the row, to which input_ids, position_ids and keep_T are then limited. If None, all of it."""
    answers: WholeAnswers | None = None
    """Whole answers of the selected tokens; None if the head computes each token alone, or all tokens are selected."""

    @property
    def num_samples(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Values of a micro-batch's samples, per token [T] unless stated; None if no sample has them."""

    sources_N: tuple[str, ...]
    """[N] name of each sample's source in a mixture, else empty text."""
    rewards_N: FloatArray | None
    """[N] reward of each sample, on the host. None if one has no reward."""
    logprobs_T: Tensor | None
    proximal_logprobs_T: Tensor | None
    ref_logprobs_T: Tensor | None
    teacher_top_T2K: Tensor | None
    """[T, 2, K] ids and log-probs of a teacher's most probable tokens."""
    advantages_T: Tensor | None
    values_T: Tensor | None
    returns_T: Tensor | None


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Splits by first-fit decreasing: bins of indices whose lengths sum to at most `budget`, each bin longest first.

    A length above the budget gets a separate bin. Ties keep their order, so the result depends on the input alone.
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


def split_padded(rows: Sequence[tuple[int, int]], budget: int) -> list[list[int]]:
    """Returns bins of indices, longest first, each with at most `budget` tokens including padding.

    rows: (longest, number) of each entry's rows. A length above the budget gets a separate bin. Ties keep their order.
    """
    bins: list[list[int]] = []
    longest = count = 0
    for index in sorted(range(len(rows)), key=lambda i: -rows[i][0]):
        length, own = rows[index]
        if bins and longest * (count + own) <= budget:
            bins[-1].append(index)
            count += own
        else:
            bins.append([index])
            longest, count = length, own
    return bins


def split_samples(samples: Sequence[Sample], budget: int, *, padded: bool) -> list[list[int]]:
    """Returns micro-batches of at most `budget` tokens, as indices, longest first.

    Samples of one prompt stay together as far as they fit, so that the prompt counts once. If rows are padded, each
    branch has its own row, and padding counts.
    """
    if padded:
        lengths = [branch_lengths(sample) for sample in samples]
        return split_padded([(max(own), len(own)) for own in lengths], budget)
    by_prompt: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(sample.prompt.token_ids.tobytes(), []).append(index)
    own = [num_own_tokens(sample) for sample in samples]
    prompt = [num_prompt_tokens(sample) for sample in samples]
    parts, sizes = [], []
    for group in by_prompt.values():
        shared = max(prompt[index] for index in group)
        for part in split_by_tokens([own[index] for index in group], budget - shared):
            parts.append([group[place] for place in part])
            sizes.append(shared + sum(own[index] for index in parts[-1]))
    whole = [[index for part in bin_ for index in parts[part]] for bin_ in split_by_tokens(sizes, budget)]
    return [sorted(indices, key=lambda index: (-prompt[index] - own[index], index)) for indices in whole]


def placeholder(num_tokens: int = 1) -> Sample:
    """Makes the sample of an empty micro-batch: tokens predicted from a prompt of one token."""
    prompt = Prompt(uid="placeholder", token_ids=np.zeros(1, np.int32), text="", answer="")
    segment = Segment(token_ids=np.zeros(num_tokens, np.int32))
    return Sample(key=SampleKey(0, 0), prompt=prompt, segments=(segment,))


def collate(
    samples: Sequence[Sample],
    device: torch.device,
    *,
    padded: bool,
    masks: Sequence[BoolArray | None],
    placeholder: int | None = None,
    whole_answers: bool = False,
) -> MicroBatch:
    """Lays samples out in the given order (longest first, so that neighbours have similar lengths).

    masks: selected tokens of each sample; None selects all. A token that begins a context must not be selected.
    placeholder: token that arrays replace, None if the model reads no arrays. whole_answers: True for a head whose
    outputs depend on whole answers. Raises ValueError if a token that the policy drew begins a context, and for arrays
    that the model does not read.
    """
    trie = Trie.of(samples)
    attention_mask, layout, predictors = None, None, trie.predictors
    token_ids, positions = trie.token_ids_S[None], trie.positions_S[None]
    if padded:
        spread, valid, predictors = _pad_branches(trie)
        token_ids, positions = trie.token_ids_S[spread] * valid, trie.positions_S[spread] * valid
        attention_mask = on_device(valid, device, torch.long)
    else:
        layout = PackedLayout.of([branch for own in trie.branches for branch in own], device)
    keep, targets, turns = [], [], []
    first_turn = 0
    for sample, places, mask in zip(samples, predictors, masks, strict=True):
        keep.append(places if mask is None else places[mask])
        targets.append(sample.token_ids if mask is None else sample.token_ids[mask])
        numbers = np.arange(first_turn, first_turn + len(sample.segments))
        own = np.repeat(numbers, [len(segment.token_ids) for segment in sample.segments])
        turns.append(own if mask is None else own[mask])
        first_turn += len(sample.segments)
    lengths = [len(own) for own in keep]
    return MicroBatch(
        input_ids=on_device(token_ids, device, torch.long),
        position_ids=on_device(positions, device, torch.long),
        attention_mask=attention_mask,
        given=_gather_arrays(trie, placeholder, device, spread if padded else None),
        layout=layout,
        keep_T=on_device(np.concatenate(keep), device, torch.long),
        targets_T=on_device(np.concatenate(targets), device, torch.long),
        sample_T=on_device(np.repeat(np.arange(len(samples)), lengths), device),
        turn_T=on_device(np.concatenate(turns), device, torch.long),
        lengths=tuple(lengths),
        answers=_gather_answers(samples, predictors, masks, device) if whole_answers else None,
    )


def _gather_answers(
    samples: Sequence[Sample], predictors: Sequence[Places], masks: Sequence[BoolArray | None], device: torch.device
) -> WholeAnswers | None:
    """Gathers all tokens of each segment with a selected token. Returns None if all of them are selected."""
    keep, targets, selected = [], [], []
    for sample, places, mask in zip(samples, predictors, masks, strict=True):
        chosen = np.ones(sample.num_tokens, np.bool_) if mask is None else mask
        sizes = [len(segment.token_ids) for segment in sample.segments]
        parts = np.split(chosen, np.cumsum(sizes)[:-1])
        whole = np.repeat([bool(part.any()) for part in parts], sizes)
        keep.append(places[whole])
        targets.append(sample.token_ids[whole])
        selected.append(chosen[whole])
    is_selected = np.concatenate(selected)
    if is_selected.all():
        return None
    return WholeAnswers(
        keep_A=on_device(np.concatenate(keep), device, torch.long),
        targets_A=on_device(np.concatenate(targets), device, torch.long),
        selected_T=on_device(np.flatnonzero(is_selected), device, torch.long),
    )


def share_row(batch: MicroBatch, mesh: DeviceMesh) -> MicroBatch:
    """Cuts a packed micro-batch down to this rank's part of its row."""
    assert batch.layout is not None
    layout, ids, positions, count = batch.layout, batch.input_ids, batch.position_ids, mesh.size()
    lacking = max(0, count - ids.shape[1])
    if lacking:  # each rank needs a token: the added ones form separate sequences whose output is not read
        extra = [np.asarray([ids.shape[1] + number]) for number in range(lacking)]
        layout = PackedLayout.of([*layout.places, *extra], layout.device)
        ids, positions = (torch.cat([each, each[:, -1:].expand(-1, lacking)], 1) for each in (ids, positions))
    sizes = tuple(len(part) for part in np.array_split(np.arange(ids.shape[1]), count))
    first = sum(sizes[: mesh.get_local_rank()])
    stop = first + sizes[mesh.get_local_rank()]
    own_T = ((batch.keep_T >= first) & (batch.keep_T < stop)).nonzero()[:, 0]
    share = RowShare(mesh=mesh, sizes=sizes, own_T=own_T)
    return replace(
        batch,
        input_ids=ids[:, first:stop],
        position_ids=positions[:, first:stop],
        layout=replace(layout, share=share),
        keep_T=batch.keep_T[own_T] - first,
        share=share,
    )


def _gather_arrays(
    trie: Trie, placeholder: int | None, device: torch.device, spread: Places | None
) -> GivenArrays | None:
    """Gathers arrays and the places of their placeholders. spread: places in the trie of a padded batch's rows."""
    if not trie.given:
        return None
    if placeholder is None:
        raise ValueError("samples have arrays in addition to their tokens, and the model reads tokens alone")
    places = np.concatenate([own.places[trie.token_ids_S[own.places] == placeholder] for own in trie.given])
    if spread is not None:
        reached, first, times = np.unique(spread.ravel(), return_index=True, return_counts=True)
        found = np.searchsorted(reached, places)
        if (times[found] > 1).any():
            raise ValueError("branches share arrays, which rows that are padded cannot: take a model that is packed")
        places = first[found]
    names = trie.given[0].inputs
    arrays = {name: np.concatenate([own.inputs[name] for own in trie.given]) for name in names}
    tensors = {name: on_device(array, device) for name, array in arrays.items()}
    return GivenArrays(arrays=tensors, places_P=on_device(places, device, torch.long))


def read_columns(samples: Sequence[Sample], device: torch.device, masks: Sequence[BoolArray | None]) -> Columns:
    """Reads the samples' columns at the selected tokens.

    Raises ValueError if only some samples have a column, or if a column's length differs from its sample's.
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

    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return Columns(
        sources_N=tuple(sample.prompt.source for sample in samples),
        rewards_N=np.array(rewards, np.float32) if len(rewards) == len(samples) else None,
        logprobs_T=read("logprobs", [sample.logprobs for sample in samples]),
        proximal_logprobs_T=read("proximal_logprobs", [sample.proximal_logprobs for sample in samples]),
        ref_logprobs_T=read("ref_logprobs", [sample.ref_logprobs for sample in samples]),
        teacher_top_T2K=read("teacher_top", [sample.teacher_top for sample in samples]),
        advantages_T=read("advantages", [sample.advantages for sample in samples]),
        values_T=read("values", [sample.values for sample in samples]),
        returns_T=read("returns", [sample.returns for sample in samples]),
    )


def _pad_branches(trie: Trie) -> tuple[Places, BoolArray, tuple[Places, ...]]:
    """Pads each branch to a row.

    Returns ([branches, longest] places in the trie; [branches, longest] True unless padding; for each sample, the flat
    place that predicts each token, in the first row of the sample that contains it).
    """
    rows = [branch for own in trie.branches for branch in own]
    longest = max(map(len, rows))
    spread = np.zeros((len(rows), longest), np.int64)
    for index, branch in enumerate(rows):
        spread[index, : len(branch)] = branch
    valid = np.arange(longest) < np.array([len(branch) for branch in rows])[:, None]
    home_S, reach = np.zeros(len(trie.token_ids_S), np.int64), len(rows) * longest
    predictors = []
    for branches, wanted in zip(reversed(trie.branches), reversed(trie.predictors), strict=True):
        for branch in reversed(branches):  # so that the first row overwrites later ones
            reach -= longest
            home_S[branch] = np.arange(reach, reach + len(branch))
        predictors.append(home_S[wanted])
    return spread, valid, tuple(reversed(predictors))


LaidOut: TypeAlias = "tuple[MicroBatch, Columns]"
"""Layout of the samples of a micro-batch, and their values."""


Collate: TypeAlias = "Callable[[Sequence[Sample], Sequence[BoolArray | None]], MicroBatch]"
"""Lays out samples as one micro-batch, for the mask [L] of each sample: True on the tokens that are computed; None for
all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplePlan:
    """Samples to accumulate, split into micro-batches."""

    make: Callable[[Sequence[int]], LaidOut]
    """Function that lays out one micro-batch."""
    split: Sequence[Sequence[int]]
    """This rank's micro-batches, as indices of samples."""
    first: LaidOut | None = None
    """The first micro-batch, if it was laid out ahead."""


class PlanQueue:
    """Plans the micro-batches of samples, and queues plans whose first micro-batch was laid out ahead."""

    def __init__(
        self, split: Callable[[Sequence[Sample]], Sequence[Sequence[int]]], collate: Collate, device: torch.device
    ) -> None:
        """split: returns the micro-batches of samples, as indices. device: place of the layouts."""
        self._split, self._collate, self._device = split, collate, device
        self._plans: deque[SamplePlan] = deque()
        """Prepared samples, the earliest first."""

    def plan(self, samples: Sequence[Sample]) -> SamplePlan:
        """Splits the samples that have trained tokens into micro-batches."""
        trained = [sample for sample in samples if sample.loss_mask is None or sample.loss_mask.any()]

        def make(rows: Sequence[int]) -> LaidOut:
            chosen = [trained[row] for row in rows] or [placeholder()]
            masks = [sample.loss_mask for sample in chosen]
            return self._collate(chosen, masks), read_columns(chosen, self._device, masks)

        return SamplePlan(make=make, split=self._split(trained))

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Queues a plan, with its first micro-batch laid out. May be called in another thread."""
        plan = self.plan(samples)
        self._plans.append(replace(plan, first=plan.make(plan.split[0])) if plan.split else plan)

    def take(self) -> SamplePlan:
        return self._plans.popleft()
