"""int8 weights for the C++ decoder, with one scale per output; activations are quantized to int8 at each product."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from interlace.core.errors import UserError
from interlace.engines.cpu import kernels

OUTPUTS, DEPTH = 16, 4
"""Outputs whose codes are adjacent in memory, and adjacent codes of each output."""
LARGEST = 127
INSTRUCTION = "avx512_vnni"
"""Linux's name of the processor flag for fast int8 products."""


class QuantizedWeights:
    """int8 copies of matrices, kept as long as the kernels point to them."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """weights: [outputs, inputs] each."""
        self._held = [quantize(weight) for weight in weights]
        self._views = (kernels.Quantized * len(self._held))(
            *(kernels.Quantized(*(tensor.data_ptr() for tensor in tensors)) for tensors in self._held)
        )

    @property
    def address(self) -> int:
        """Returns the address of the kernels' array of structures, in order of the weights."""
        return ctypes.addressof(self._views)


@torch.no_grad()
def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes, scales and 128 times the sum of each output's codes, in the layout of `Quantized` in int8.h."""
    width, depth = weight.shape
    scale = weight.abs().amax(1).clamp(min=1e-30) / LARGEST
    codes = (weight / scale[:, None]).round_().to(torch.int8)
    codes = torch.nn.functional.pad(codes, (0, -depth % DEPTH, 0, -width % OUTPUTS))
    blocks = codes.view(-1, OUTPUTS, codes.shape[1] // DEPTH, DEPTH).transpose(1, 2).contiguous()
    scale = torch.nn.functional.pad(scale, (0, -width % OUTPUTS))
    return blocks, scale.contiguous(), codes.sum(1, dtype=torch.int32) * 128


def refuse_eight_bits(model: PreTrainedModel) -> NoReturn:
    """Raises UserError: the runner that serves this model does not support int8 weights."""
    raise UserError(
        "rollout.weights=int8 is for the C++ decoder: float32 models of the Llama shape, on CPU cores with a compiler "
        f"(rollout.compile_kernels, rollout.compile_decoder), whole in one process. {type(model).__name__} in "
        f"{str(model.dtype).removeprefix('torch.')} is served otherwise here: set rollout.weights=model."
    )


def check_processor() -> None:
    """Raises UserError if int8 would be slower than the model's type on this processor."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    if INSTRUCTION not in flags:
        raise UserError(
            f"rollout.weights=int8 is for processors with {INSTRUCTION.upper()} instructions, and this one has none: "
            "it would be slower than rollout.weights=model."
        )
