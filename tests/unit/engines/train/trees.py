"""Random trees of segments, and the plain model's results for each branch."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from interlace.core.types import PROMPT, Prompt, Sample, SampleKey, Segment
from tests.unit.engines.train.models import VOCABULARY

SHAPES = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 5), st.sampled_from(("all", "none", "some"))), min_size=1, max_size=7
)
"""Of each segment: which of those before it, the prompt or nothing it continues; its length; which of it is sampled."""
FORESTS = st.lists(st.tuples(st.integers(0, 1), SHAPES), min_size=1, max_size=3)
"""Of each sample: which of two prompts it answers, and its segments."""


def tokens(draw: np.random.Generator, count: int) -> np.ndarray:
    return draw.integers(3, VOCABULARY, count).astype(np.int32)


def tree_samples(forest: Sequence[tuple[int, Sequence[tuple[int, int, str]]]], seed: int = 0) -> list[Sample]:
    """Samples with the columns that a policy loss reads."""
    draw = np.random.default_rng(seed)
    prompts = [Prompt(uid=str(n), token_ids=tokens(draw, 1 + 5 * n), text="", answer="") for n in range(2)]
    samples = []
    for index, (prompt, shapes) in enumerate(forest):
        segments = _segments(shapes, len(prompts[prompt].token_ids), draw)
        length = sum(len(segment.token_ids) for segment in segments)
        samples.append(
            Sample(
                key=SampleKey(prompt, index),
                prompt=prompts[prompt],
                segments=segments,
                advantages=draw.normal(size=length).astype(np.float32),
                values=draw.normal(size=length).astype(np.float32),
                returns=draw.normal(size=length).astype(np.float32),
            )
        )
    return samples


def _segments(shapes: Sequence[tuple[int, int, str]], prompt: int, draw: np.random.Generator) -> tuple[Segment, ...]:
    made: list[Segment] = []
    before: list[int] = []
    for pick, length, kind in shapes:
        parent = (PROMPT, None, *range(len(made)))[pick % (2 + len(made))]
        below = prompt if parent == PROMPT else 0 if parent is None else before[parent] + len(made[parent].token_ids)
        mask = {"all": np.ones(length, np.bool_), "none": np.zeros(length, np.bool_)}.get(
            kind, draw.random(length) < 0.5
        )
        if not below:
            mask[:1] = False
        made.append(
            Segment(
                parent=parent,
                token_ids=tokens(draw, length),
                sampled=None if mask.all() else mask,
                logprobs=-draw.random(length, np.float32),
            )
        )
        before.append(below)
    return tuple(made)


def branches_of(sample: Sample) -> list[list[int]]:
    """Segments of each branch, root to leaf, found from the leaves up."""
    parents = [segment.parent for segment in sample.segments]
    found = []
    for leaf in range(len(parents)):
        if leaf not in parents:
            path, at = [leaf], parents[leaf]
            while at is not None and at != PROMPT:
                path.insert(0, at)
                at = parents[at]
            found.append(path)
    return found


def outputs_alone(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """[L, outputs] from which each token is predicted, each branch in a forward of its own; a token of several branches
    from the first; zeros for a token that begins a context."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for path in branches_of(sample):
        head = [] if sample.segments[path[0]].parent is None else [sample.prompt.token_ids]
        ids = np.concatenate([*head, *[sample.segments[index].token_ids for index in path]])
        if not len(ids):
            continue
        row = torch.from_numpy(ids).long()[None]
        outputs = model(row, attention_mask=torch.ones_like(row), use_cache=False).logits.float()[0]
        at = sum(map(len, head))
        for index in path:
            for offset in range(len(sample.segments[index].token_ids)):
                previous = outputs[at - 1] if at else torch.zeros_like(outputs[0])
                found.setdefault((index, offset), previous)
                at += 1
    order = [(i, offset) for i, segment in enumerate(sample.segments) for offset in range(len(segment.token_ids))]
    return torch.stack([found[place] for place in order]) if order else torch.zeros(0, 1)


def logprobs_alone(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """[L] of `outputs_alone`; 0 for a token that begins a context."""
    if not sample.num_tokens:
        return torch.zeros(0)
    outputs = outputs_alone(model, sample)
    chosen = torch.from_numpy(sample.token_ids).long()[:, None]
    return outputs.log_softmax(-1).gather(-1, chosen)[:, 0] * outputs.any(-1)


def trained(sample: Sample) -> torch.Tensor:
    """[L] bool."""
    mask = sample.loss_mask
    return torch.ones(sample.num_tokens, dtype=torch.bool) if mask is None else torch.from_numpy(mask)


Forest = Sequence[tuple[int, Sequence[tuple[int, int, str]]]]
Build = Callable[[], PreTrainedModel]
