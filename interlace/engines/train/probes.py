"""Checks of a model at load: packed rows, padded rows and a backward pass give the same results as the plain model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from interlace.core.errors import UserError
from interlace.engines.train.attention import PACKED_ATTENTION, PackedLayout, register
from interlace.models.length_changes import MODEL_ERRORS, LengthChange, find_length_changes, lower_limit, probe_ids
from interlace.models.size import context_length

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from interlace.engines.train.ranks import Ranks

PROBE_SIZES = (7, 5, 3)
PROBE_TOLERANCE = 1e-3
SMALLEST_GRADIENT = 1e-2
"""Share of the largest gradient below which differences are not compared with the gradient itself: it may be 0."""


def install_packed_attention(model: PreTrainedModel, ranks: Ranks) -> str | None:
    """Replaces the model's attention and checks that the results are the same at every length.

    Returns None, or the reason why the model keeps its own attention.
    """
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or []
    if "chunked_attention" in layer_types:
        return "its chunked attention lives in the mask only"
    if not model._can_set_attn_implementation():
        return f"{type(model).__name__} does not call transformers' attention interface"
    own = model.config._attn_implementation
    register()
    refusal = _find_difference(model, own, None, layer_types)
    for change in () if refusal else find_length_changes(model.config, context_length(model.config)):
        refusal = refusal or _find_difference(model, own, change, layer_types)
    refusal = next(filter(None, ranks.gather_texts(refusal or "")), None)  # all ranks use the first rank's reason
    model.set_attn_implementation(PACKED_ATTENTION if refusal is None else own)
    return refusal


def _find_difference(
    model: PreTrainedModel, own: str, change: LengthChange | None, layer_types: Sequence[str]
) -> str | None:
    """Compares packed attention with the model's own attention, at a length that passes the change."""
    sizes = PROBE_SIZES if change is None else (PROBE_SIZES[0], change.probe_tokens, PROBE_SIZES[2])
    windows: list[int | None] = []
    try:
        if change is None or change.is_reached:
            expected = run_alone(model, sizes, own)
            got = _run_packed(model, sizes, windows)
        else:
            unchanged = run_alone(model, sizes, own)
            with lower_limit(model, change):
                expected = run_alone(model, sizes, own)
                got = _run_packed(model, sizes, windows)
            if torch.equal(expected, unchanged):
                return None if change.is_window else f"its {change.field} = {change.tokens} could not be probed"
    except MODEL_ERRORS as error:
        return f"packed attention failed in {type(model).__name__} ({type(error).__name__}: {error})"
    where = "" if change is None else f" beyond {change.field} = {change.tokens}"
    return _compare_logits(expected, got, windows, layer_types, where)


def _compare_logits(
    expected: Tensor, got: Tensor, windows: list[int | None], layer_types: Sequence[str], where: str
) -> str | None:
    if not windows:
        return "its layers never called the attention interface"
    num_sliding, num_windows = layer_types.count("sliding_attention"), sum(window is not None for window in windows)
    if num_windows < num_sliding:
        return f"{num_sliding} layers slide but only {num_windows} passed their window to attention"
    gap = relative_gap(expected, got)
    if gap < PROBE_TOLERANCE:
        return None
    return f"logits differ from the model's own attention by {gap:.1e} of the largest{where}"


def relative_gap(expected: Tensor, got: Tensor) -> float:
    """Returns the largest difference, as a share of the largest expected value; 0 if both are equal."""
    gap = float((expected - got).abs().max())
    return gap and gap / float(expected.abs().max())


def vector_gradients(model: PreTrainedModel, first: int = 0) -> dict[str, Tensor]:
    """Computes the gradients of vectors and numbers, such as norms, which each rank holds whole.

    They are gradients of a fixed sum of the logits. first: first of this rank's columns of the logits.
    """
    from torch.distributed.tensor import DTensor

    whole = {name: each for name, each in model.named_parameters() if not isinstance(each, DTensor)}
    vectors = {name: each for name, each in whole.items() if each.ndim < 2 and each.requires_grad}
    if not vectors:  # such as OLMo's, whose norms have no weights
        return {}
    rows = _probe_ids(model, PROBE_SIZES).split(list(PROBE_SIZES))
    logits = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])
    places, columns = (torch.arange(size, device=logits.device) for size in logits.shape)
    weights = (places[:, None] * 5 + (columns + first) * 3) % 7 - 3
    found = torch.autograd.grad((logits * weights).sum(), [*vectors.values()], allow_unused=True)
    return {name: each for name, each in zip(vectors, found, strict=True) if each is not None}


def gradient_gaps(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the largest difference of each gradient in `got`, as a share of its largest number."""
    sizes = {name: float(each.abs().max()) for name, each in expected.items()}
    least = SMALLEST_GRADIENT * max(sizes.values(), default=0.0)
    gaps = {name: float((expected[name] - each).abs().max()) for name, each in got.items()}
    return {name: gap and gap / max(sizes[name], least) for name, gap in gaps.items()}


def check_padded(model: PreTrainedModel) -> None:
    """Raises UserError if rows padded on the right give other logits than the same rows run alone."""
    changes = find_length_changes(model.config, context_length(model.config))
    reached = [change.probe_tokens for change in changes if change.is_reached]
    sizes = (*PROBE_SIZES, *([max(reached)] if reached else []))
    name = type(model).__name__
    try:
        expected, padded = run_alone(model, sizes), _run_padded(model, sizes)
    except MODEL_ERRORS as error:
        raise UserError(
            f"{name} cannot be trained: its forward pass fails on a batch ({type(error).__name__}: {error}). "
            "Give a causal language model that transformers runs on padded batches."
        ) from error
    if not expected.isfinite().all():
        raise UserError(_describe_not_finite(model))
    gap = relative_gap(expected, padded)
    if not gap < PROBE_TOLERANCE:
        raise UserError(
            f"{name} cannot be trained: padding changes its logits by {gap:.1e} of the largest, and packed rows are "
            "not possible either. Give a model whose padded rows are computed as single rows are."
        )


def _describe_not_finite(model: PreTrainedModel) -> str:
    """Returns the message for a model with NaN or infinite logits, with the name of the first weight that causes it."""
    name = type(model).__name__
    for key, weight in model.named_parameters():
        if not weight.isfinite().all():
            return (
                f"{name} cannot be trained: its logits are not finite, because {key} contains NaN or infinity. "
                "Give an undamaged model."
            )
    return (
        f"{name} cannot be trained: its logits are not finite, although all weights are finite. "
        "Give another model, or another model.dtype."
    )


@torch.no_grad()
def run_alone(model: PreTrainedModel, sizes: Sequence[int] = PROBE_SIZES, attention: str | None = None) -> Tensor:
    """Computes [sum of sizes, outputs] of sequences, each run alone. attention: the implementation to use."""
    if attention is not None:
        model.set_attn_implementation(attention)
    rows = _probe_ids(model, sizes).split(list(sizes))
    return torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])


@torch.no_grad()
def _run_packed(model: PreTrainedModel, sizes: Sequence[int], windows: list[int | None]) -> Tensor:
    model.set_attn_implementation(PACKED_ATTENTION)
    device = model.device
    positions = torch.cat([torch.arange(size) for size in sizes]).to(device)[None]
    places = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    layout = PackedLayout.of(places, device, on_call=windows.append)
    ids = _probe_ids(model, sizes)[None]
    logits: Tensor = model(ids, position_ids=positions, use_cache=False, packed_layout=layout).logits
    return logits[0]


@torch.no_grad()
def _run_padded(model: PreTrainedModel, sizes: Sequence[int]) -> Tensor:
    rows = _probe_ids(model, sizes).split(list(sizes))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    valid = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    logits = model(ids, attention_mask=valid, position_ids=positions, use_cache=False).logits
    return torch.cat([row[:size] for row, size in zip(logits, sizes, strict=True)])


def _probe_ids(model: PreTrainedModel, sizes: Sequence[int]) -> Tensor:
    return probe_ids(model.config.get_text_config().vocab_size, sum(sizes), model.device)


def check_backward(model: PreTrainedModel, compute_loss: Callable[[], Tensor], reduced_over: Ranks | None) -> None:
    """Raises UserError if the model's backward pass fails. The gradients stay.

    compute_loss: runs a forward pass. reduced_over: ranks over which unsharded gradients are summed, or None.
    """
    try:
        loss = compute_loss()
        if reduced_over is None:
            loss.backward()
        else:
            reduced_over.reduce(model, loss)
    except MODEL_ERRORS as error:
        raise UserError(
            f"{type(model).__name__} cannot be trained: its backward pass fails "
            f"({type(error).__name__}: {error}). Give a causal language model that can be trained."
        ) from error


def check_router_loss(model: PreTrainedModel) -> None:
    """Raises UserError if the configuration requests a load-balancing loss, which this trainer does not add."""
    text = model.config.get_text_config()
    # Configurations name the coefficient differently (DBRX: ffn_config.moe_loss_weight), and the models store it.
    stored = (getattr(model, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
    coefficient = next(filter(None, (*stored, getattr(text, "router_aux_loss_coef", None))), None)
    if getattr(text, "output_router_logits", False) and coefficient:
        raise UserError(
            f"{type(model).__name__}: its config.json requests a load-balancing loss of the routers "
            f"(output_router_logits=true, with the coefficient {coefficient}), which the trainer does not add. "
            "Set output_router_logits=false in config.json to train with the policy loss alone."
        )
