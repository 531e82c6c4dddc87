"""Weights of the C++ decoder in eight bits, one scale an output; activations are cut to eight bits as they come."""

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
"""Outputs whose codes lie side by side, and codes of each."""
LARGEST = 127
INSTRUCTION = "avx512_vnni"
"""Flag of a processor that multiplies eight bits fast, as Linux names it."""


class QuantizedWeights:
    """Some matrices in eight bits, kept as long as the kernels point to them."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """weights: [outputs, inputs] each."""
        self._held = [quantize(weight) for weight in weights]
        self._views = (kernels.Quantized * len(self._held))(
            *(kernels.Quantized(*(tensor.data_ptr() for tensor in tensors)) for tensors in self._held)
        )

    @property
    def address(self) -> int:
        """Returns where the kernels find them, in order."""
        return ctypes.addressof(self._views)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._held for tensor in tensors)


@torch.no_grad()
def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes, scales and 128 times each output's sum of codes, as `Quantized` in int8.h has them."""
    width, depth = weight.shape
    scale = weight.abs().amax(1).clamp(min=1e-30) / LARGEST
    codes = (weight / scale[:, None]).round_().to(torch.int8)
    codes = torch.nn.functional.pad(codes, (0, -depth % DEPTH, 0, -width % OUTPUTS))
    blocks = codes.view(-1, OUTPUTS, codes.shape[1] // DEPTH, DEPTH).transpose(1, 2).contiguous()
    scale = torch.nn.functional.pad(scale, (0, -width % OUTPUTS))
    return blocks, scale.contiguous(), codes.sum(1, dtype=torch.int32) * 128


def refuse_eight_bits(model: PreTrainedModel) -> NoReturn:
    """Raises UserError: what serves a model here has no weights in eight bits."""
    raise UserError(
        "rollout.weights=int8 is for the C++ decoder: float32 models of the Llama shape, on CPU cores with a compiler "
        f"(rollout.compile_kernels, rollout.compile_decoder), whole in one process. {type(model).__name__} in "
        f"{str(model.dtype).removeprefix('torch.')} is served otherwise here: set rollout.weights=model."
    )


def check_processor() -> None:
    """Raises UserError where eight bits would be slower than the model's own type."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    if INSTRUCTION not in flags:
        raise UserError(
            f"rollout.weights=int8 is for processors with {INSTRUCTION.upper()} instructions, and this one has none: "
            "it would be slower than rollout.weights=model."
        )
