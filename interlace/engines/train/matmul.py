"""Matrix products of linear layers by oneDNN, on CPUs for which it is the faster library.

torch computes float32 products with MKL, whose kernels for processors of makers other than Intel stop at AVX2. oneDNN,
which is part of torch too, uses all instructions of the processor: with AVX-512 it is twice as fast. On Intel's
processors MKL uses them too, and small products take less time: oneDNN generates code for each new shape, and almost
every micro-batch has another number of tokens.
"""

import platform
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FASTER_FROM = 1 << 20
"""Multiplications of a product, below which oneDNN takes longer to find its kernel than MKL takes to compute."""
LARGEST_OF_MKL = 512
"""Largest side of a weight that Intel's processors multiply by MKL. MKL's bits for a row depend on the number of rows
in longer sums, and in sums of any length if there are fewer than 16 rows. The bits of the gradients of a weight depend
on the number of threads from about 2,000 rows on."""


def use_fast_products(model: nn.Module) -> None:
    """Makes the model's plain linear layers compute large float32 products by oneDNN, if that is faster.

    Parameters, names and gradients stay the same; sums are computed in another order.
    """
    if not _is_faster():
        return
    smallest = LARGEST_OF_MKL + 1 if _is_intel() else 0
    for module in model.modules():
        if type(module) is nn.Linear and max(module.weight.shape) >= smallest:
            module.__class__ = OneDnnLinear


def _is_faster() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "Intel" in platform.processor()


class OneDnnLinear(nn.Linear):
    """A linear layer that computes large products with oneDNN, in the forward and in the backward."""

    def forward(self, input: Tensor) -> Tensor:
        """Computes [..., in] -> [..., out]."""
        is_float = input.dtype == self.weight.dtype == torch.float32
        out_features = self.weight.shape[0]  # of this rank's part, if several ranks share the layer
        if not is_float or input.numel() * out_features < FASTER_FROM:
            return super().forward(input)
        return cast("Tensor", _Product.apply(input, self.weight, self.bias))


class _Product(torch.autograd.Function):
    """Computes input @ weight.T + bias. The result is not a view, because FSDP warns of a model that returns one."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, input: Tensor, weight_NK: Tensor, bias_N: Tensor | None
    ) -> Tensor:
        rows_TK = input.reshape(-1, input.shape[-1])
        ctx.save_for_backward(rows_TK, weight_NK)
        ctx.shape = input.shape  # type: ignore[attr-defined]
        product_TN = _multiply_rows(rows_TK, weight_NK, bias_N)
        # With a view, the caller could not change the result in place, as some models do.
        return torch.ops.aten._unsafe_view(product_TN, (*input.shape[:-1], weight_NK.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows_TK, weight_NK = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient_TN = gradient.reshape(-1, gradient.shape[-1])
        of_rows, of_weight, of_bias = ctx.needs_input_grad  # type: ignore[attr-defined]
        return (
            _multiply_rows(gradient_TN, weight_NK.t()).view(ctx.shape) if of_rows else None,  # type: ignore[attr-defined]
            _weight_gradient(gradient_TN, rows_TK) if of_weight else None,
            gradient_TN.sum(0) if of_bias else None,
        )


def _weight_gradient(gradient_TN: Tensor, rows_TK: Tensor) -> Tensor:
    """Computes [N, K] in the order with longer rows, which is a quarter faster."""
    if gradient_TN.shape[1] <= rows_TK.shape[1]:
        return _multiply_rows(gradient_TN.t(), rows_TK.t())
    return _multiply_rows(rows_TK.t(), gradient_TN.t()).t()


def _multiply_rows(rows_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Computes [T, N]."""
    return cast("Tensor", torch.ops.interlace.times(rows_TK, weight_NK, bias_N))


def _by_onednn(rows_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return cast("Tensor", torch.ops.mkldnn._linear_pointwise(rows_TK, weight_NK, bias_N, "none", [], ""))


def _shape_only(rows_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    del bias_N
    return rows_TK.new_empty(rows_TK.shape[0], weight_NK.shape[0])


# A separate operator, because torch.compile has no code for oneDNN's operator in training.
_LIBRARY = torch.library.Library("interlace", "DEF")
_LIBRARY.define("times(Tensor rows_TK, Tensor weight_NK, Tensor? bias_N) -> Tensor")
_LIBRARY.impl("times", _by_onednn, "CPU")
torch.library.register_fake("interlace::times", _shape_only, lib=_LIBRARY)
