"""Differentiable sums and exchanges between the ranks of a mesh axis."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh


def add_up(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the sum of the ranks' tensors. The gradient is equal on all ranks and passes unchanged."""
    return cast("Tensor", _Sum.apply(tensor, mesh))


def add_gradients(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns a tensor that is equal on all ranks; its gradient is the sum of the ranks' gradients."""
    return cast("Tensor", _GradientSum.apply(tensor, mesh))


def gather_parts(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gathers one tensor of equal shape from each rank, without gradients. Returns [ranks, ...]."""
    own = tensor.detach().contiguous()
    found = own.new_empty(mesh.size(), *own.shape)
    distributed.all_gather([*found.unbind()], own, group=mesh.get_group())
    return found


def exchange_rows(rows: Tensor, given: Sequence[int], taken: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Sends consecutive slices of the rows to the ranks and returns the received rows (all-to-all, differentiable).

    given, taken: number of rows sent to and received from each rank.
    """
    return cast("Tensor", _Exchange.apply(rows, given, taken, mesh))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        del ctx
        return _sum_tensor(tensor, mesh)

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
        return _sum_tensor(gradients[0], ctx.mesh), None  # type: ignore[attr-defined]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        rows: Tensor,
        given: Sequence[int],
        taken: Sequence[int],
        mesh: DeviceMesh,
    ) -> Tensor:
        ctx.back = (taken, given, mesh)  # type: ignore[attr-defined]
        return _exchange_rows(rows, given, taken, mesh)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(gradients[0], *ctx.back), None, None, None  # type: ignore[attr-defined]


def _exchange_rows(rows: Tensor, given: Sequence[int], taken: Sequence[int], mesh: DeviceMesh) -> Tensor:
    found = rows.new_empty(sum(taken), *rows.shape[1:])
    distributed.all_to_all_single(found, rows.contiguous(), [*taken], [*given], group=mesh.get_group())
    return found


def _sum_tensor(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=mesh.get_group())
    return total
