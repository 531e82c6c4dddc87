"""Sums and exchanges between the ranks of a mesh's axis that gradients pass through."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import distributed

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def add_up(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Adds up the ranks' tensors; the gradient, which is the same on all of them, passes as it is."""
    return cast("Tensor", _Sum.apply(tensor, mesh))


def add_gradients(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns a tensor that all ranks have alike; its gradient is the sum of theirs."""
    return cast("Tensor", _GradientSum.apply(tensor, mesh))


def gathered(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns [ranks, ...], each rank's tensor of one shape, without a gradient."""
    own = tensor.detach().contiguous()
    found = own.new_empty(mesh.size(), *own.shape)
    distributed.all_gather([*found.unbind()], own, group=mesh.get_group())
    return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        del ctx
        return _sum(tensor, mesh)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None


class _GradientSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.mesh), None  # type: ignore[attr-defined]


def _sum(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=mesh.get_group())
    return total
