"""Time and memory of training under a layout: how parallelism divides a model, from its shape and a data sheet."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from interlace.forecast.costs.roofline import BANDWIDTH_SHARE, LAUNCH_S, TRAIN_SHARE, ModelShape
from interlace.forecast.costs.sheets import DataSheet

BF16, FLOAT = 2, 4
"""Bytes of a number."""
MOMENT_BYTES = 12
"""Bytes of a float32 copy and two moments, for each trained parameter."""
USABLE_SHARE = 0.9
"""Share of a device's memory that training may use; the rest is the context of the driver and fragments."""
ROWS_PER_TOKEN = 17
"""Numbers of the hidden size that a layer keeps of a token for its backward pass (Korthikanti et al., arXiv 2205.05198,
eq. 2: 34 bytes in bf16, with attention that stores no scores)."""
TENSORS = CONTEXTS = (1, 2, 4, 8)
EXPERTS = (1, 2, 4, 8, 16, 32, 64)
MICROBATCHES = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens of a micro-batch that are tried."""
LINK_SHARE = 0.7
"""Share of a link's bandwidth that collective operations reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainLayout:
    """Division of a model and its batch among the devices that train."""

    num_devices: int
    tensor: int = 1
    """Devices that share each matrix."""
    context: int = 1
    """Devices that share each sequence."""
    expert: int = 1
    """Devices that share the experts of a layer; part of the devices with different samples."""
    pipeline: int = 1
    """Groups of consecutive layers. Only for forecasts of other systems: a recipe has one."""
    tokens_per_microbatch: int = 8192
    """Tokens of a forward pass, of the devices that share sequences and matrices together."""
    recomputes: bool = True
    """Recomputes each layer in the backward pass."""
    reshards: bool = True
    """Divides weights and gradients among all devices too (ZeRO stage 3, arXiv 1910.02054)."""

    @property
    def data(self) -> int:
        """Groups of devices with different samples."""
        return self.num_devices // (self.tensor * self.context * self.pipeline)

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of a recipe, as KEY=VALUE, that differ from one process per device without sharing."""
        found = {
            "actor.tensor_parallel": self.tensor,
            "actor.context_parallel": self.context,
            "actor.expert_parallel": self.expert,
        }
        lines = [f"{name}={size}" for name, size in found.items() if size > 1]
        lines += [] if self.reshards else ["actor.reshard=false"]
        lines += ["actor.gradient_checkpointing=true"] if self.recomputes else []
        return (*lines, f"tokens_per_microbatch={self.tokens_per_microbatch}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutForecast:
    """Predicted training of one step under a layout."""

    layout: TrainLayout
    step_s: float
    parts: Mapping[str, float]
    """Seconds by part: compute, bubble, tensor, context, experts, launch, weights, optimizer."""
    memory: Mapping[str, float]
    """Bytes per device by part: weights, gradients, moments, activations, logits."""

    @property
    def memory_bytes(self) -> float:
        """Bytes on the fullest device."""
        return sum(self.memory.values())


def forecast_layout(
    layout: TrainLayout, shape: ModelShape, sheet: DataSheet, num_tokens: int, *, flops_share: float = TRAIN_SHARE
) -> LayoutForecast:
    """Predicts one optimizer step on `num_tokens` prompt and response tokens.

    flops_share: share of the data sheet's arithmetic that is reached.
    """
    parts = _time_parts(layout, shape, sheet, num_tokens, flops_share)
    memory = _memory_parts(layout, shape)
    return LayoutForecast(layout=layout, step_s=sum(parts.values()), parts=parts, memory=memory)


def _time_parts(
    layout: TrainLayout, shape: ModelShape, sheet: DataSheet, num_tokens: int, flops_share: float
) -> dict[str, float]:
    passes = 4 if layout.recomputes else 3  # forward, backward twice as much, and forward again
    flops = 2 * passes * shape.active_parameters
    compute_s = num_tokens * flops / (layout.num_devices * flops_share * sheet.flops)
    microbatches = max(1, math.ceil(num_tokens / (layout.data * layout.tokens_per_microbatch)))
    bubble_s = compute_s * (layout.pipeline - 1) / microbatches  # GPipe and 1F1B, arXiv 2104.04473, section 2.2.1
    tokens_each = num_tokens / layout.data / layout.context  # of one device that shares matrices
    layers = shape.num_layers / layout.pipeline
    row_bytes = tokens_each * shape.hidden_bytes_per_token
    # Two all-reduces per layer and pass, each moving 2 (t - 1) / t of a row; a recomputed pass repeats them.
    reduces = 2 * layers * (passes - 1)
    tensor_s = reduces * 2 * (layout.tensor - 1) / layout.tensor * row_bytes / _link(sheet, layout.tensor)
    # Ulysses (arXiv 2309.14509) exchanges queries, keys, values and outputs.
    swaps = 4 * layers * (passes - 1) * (layout.context - 1) / layout.context
    context_s = swaps * row_bytes / layout.tensor / _link(sheet, layout.context * layout.tensor)
    exchanges = 2 * layers * (passes - 1) * shape.experts_per_token * (layout.expert - 1) / layout.expert
    experts_s = exchanges * row_bytes / layout.tensor / _link(sheet, layout.expert * layout.tensor)
    per_device = BF16 * shape.num_parameters / layout.pipeline / layout.tensor
    gathers = microbatches * (passes - 1) if layout.reshards else 2
    group = layout.data * layout.context
    weights_s = gathers * per_device * (group - 1) / group / _link(sheet, layout.num_devices)
    weights_s = max(0.0, weights_s - compute_s)  # gathered while earlier layers compute
    state_bytes = (MOMENT_BYTES + FLOAT) * shape.num_parameters / layout.num_devices
    return {
        "compute": compute_s,
        "bubble": bubble_s,
        "tensor": tensor_s,
        "context": context_s,
        "experts": experts_s,
        "launch": max(0.0, microbatches * passes * LAUNCH_S - compute_s),  # launched while earlier kernels compute
        "weights": weights_s,
        "optimizer": state_bytes / (BANDWIDTH_SHARE * sheet.bytes_per_s / 2),
    }


def _link(sheet: DataSheet, devices: int) -> float:
    """Returns the bandwidth between `devices` neighbours, per device."""
    return LINK_SHARE * (sheet.link_bytes_per_s if devices <= sheet.node_devices else sheet.network_bytes_per_s)


def _memory_parts(layout: TrainLayout, shape: ModelShape) -> dict[str, float]:
    total, held = shape.num_parameters, layout.tensor * layout.pipeline
    dense = (total - shape.expert_parameters) / held
    whole = dense + shape.expert_parameters / (held * layout.expert)
    kept = total / layout.num_devices if layout.reshards else whole
    gathered = whole / max(1.0, shape.num_layers / layout.pipeline) if layout.reshards else 0.0
    tokens = layout.tokens_per_microbatch / layout.context / layout.tensor
    layer_bytes = ROWS_PER_TOKEN * shape.hidden_bytes_per_token
    layers = shape.num_layers / layout.pipeline
    if layout.recomputes:
        activations = tokens * (layers * shape.hidden_bytes_per_token + layer_bytes)
    else:
        activations = tokens * layers * layer_bytes
    return {
        "weights": BF16 * (kept + 2 * gathered),
        "gradients": FLOAT * kept,
        "moments": MOMENT_BYTES * total / layout.num_devices,
        "activations": activations * layout.pipeline,  # 1F1B keeps as many micro-batches as stages
        "logits": 2 * tokens * shape.logit_bytes_per_token,
    }


def list_layouts(shape: ModelShape, num_devices: int, longest: int) -> Iterator[TrainLayout]:
    """Yields the layouts of a recipe that divide the devices and the model. longest: tokens of the longest sequence."""
    experts = [size for size in EXPERTS if size == 1 or (shape.num_experts and shape.num_experts % size == 0)]
    microbatches = [count for count in MICROBATCHES if count >= min(longest, MICROBATCHES[-1])]
    for tensor, context, expert in product(TENSORS, CONTEXTS, experts):
        if num_devices % (tensor * context) or shape.num_kv_heads % (tensor * context):
            continue
        # Devices that share matrices share experts already.
        if num_devices // tensor % expert or (expert > 1 and tensor > 1):
            continue
        for tokens, recomputes, reshards in product(microbatches, (False, True), (False, True)):
            yield TrainLayout(
                num_devices=num_devices, tensor=tensor, context=context, expert=expert, tokens_per_microbatch=tokens,
                recomputes=recomputes, reshards=reshards,
            )  # fmt: skip


def search_layouts(
    shape: ModelShape, sheet: DataSheet, num_devices: int, num_tokens: int, longest: int
) -> list[LayoutForecast]:
    """Returns the layouts that fit into memory, the fastest first, and of equally fast ones the smallest.

    num_tokens: of an optimizer step. longest: tokens of the longest sequence. Returns an empty list if none fits.
    """
    found = [forecast_layout(layout, shape, sheet, num_tokens) for layout in list_layouts(shape, num_devices, longest)]
    fitting = [each for each in found if each.memory_bytes <= USABLE_SHARE * sheet.memory_bytes]
    return sorted(fitting, key=lambda each: (float(f"{each.step_s:.3g}"), each.memory_bytes))
