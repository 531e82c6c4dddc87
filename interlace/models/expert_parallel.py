"""Expert parallelism: the experts of a mixture are distributed over ranks with different tokens (arXiv 2006.16668).

A module of experts stores their weights in stacked tensors, whose first dimension is the expert; each rank holds whole
experts. In the forward pass, each pair of a token and its chosen expert is sent to the expert's rank, and the output is
sent back (two all-to-all exchanges per layer). The token's rank weights and sums the outputs. transformers 5.23 and
later do the same for models that they load and shard themselves; this module serves models of which each rank reads its
own part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed, nn

from interlace.core.errors import UserError
from interlace.models.collectives import exchange_rows
from interlace.models.tensor_parallel import compute_with_parts, cut, expert_inputs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that contain stacked experts."""
    return [module for module in model.modules() if _is_stack(module)]


def check_experts(model: PreTrainedModel, size: int, rest: int, setting: str) -> None:
    """Raises UserError if the experts cannot be distributed over `size` ranks. The model may be on the meta device.

    rest: number of ranks among which each expert is sharded further. setting: key of the recipe, for the message.
    """
    if size == 1:
        return
    name, found = type(model).__name__, expert_modules(model)
    if not found:
        raise UserError(f"{setting}={size}, but {name} has no layers of experts in stacked tensors. Set it to 1.")
    for module in found:
        num_experts = cast("int", module.num_experts)
        if num_experts % size:
            raise UserError(f"{setting}={size}, but {name} has {num_experts} experts a layer: set it to a divisor.")
        uneven = [tuple(tensor.shape) for tensor in module.parameters() if tensor.shape[1] % rest]
        if uneven:
            raise UserError(
                f"{setting}={size}: each expert of {name} would be cut up among {rest} further ranks, and tensors of "
                f"shape {uneven[0]} cannot be cut evenly along their second dimension. Raise {setting}, or take fewer "
                "ranks."
            )


def share_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Distributes the experts of a model that is equal on every rank of the mesh. It may be on the meta device."""
    for module in expert_modules(model):
        _share_module(module, mesh)


def _is_stack(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False)]
    num_experts = getattr(module, "num_experts", None)
    return any(tensor.ndim == 3 for tensor in own) and all(tensor.shape[0] == num_experts for tensor in own)


def _share_module(module: nn.Module, mesh: DeviceMesh) -> None:
    num_experts = cast("int", module.num_experts)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    cut(module, mesh, dict.fromkeys(names, 0))
    compute_with_parts(module, names)
    travels: list[_Travel] = []

    def send(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows, chosen, weights = expert_inputs(args, kwargs)
        travel = _Travel(chosen, weights, num_experts, mesh)
        travels.append(travel)
        vars(module)["num_experts"] = num_experts // mesh.size()
        return travel.send_to_experts(rows), {}

    def bring_back(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        del args
        vars(module)["num_experts"] = num_experts
        return travels.pop().combine_outputs(output)

    module.register_forward_pre_hook(send, with_kwargs=True)
    module.register_forward_hook(bring_back)


class _Travel:
    """Exchange of the rows of one forward pass: counts and order of the rows for each rank."""

    def __init__(self, chosen: Tensor, weights: Tensor, num_experts: int, mesh: DeviceMesh) -> None:
        """chosen: [tokens, k] experts of each token. weights: [tokens, k] their weights."""
        self._mesh, self._weights = mesh, weights
        experts = chosen.reshape(-1)
        self._order = torch.argsort(experts, stable=True)
        """[tokens * k] indices that sort the pairs by expert, and thereby by rank."""
        counts = torch.bincount(experts, minlength=num_experts)
        taken = torch.empty_like(counts)
        distributed.all_to_all_single(taken, counts, group=mesh.get_group())
        each = taken.view(mesh.size(), -1)
        self._given = counts.view(mesh.size(), -1).sum(1).tolist()
        self._taken = each.sum(1).tolist()
        self._experts = torch.arange(each.shape[1], device=each.device).repeat(mesh.size()).repeat_interleave(taken)

    def send_to_experts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sends rows [tokens, H]. Returns the rows received for this rank's experts, the expert of each row, and
        weights of 1.
        """
        sent = rows.index_select(0, self._order // self._weights.shape[1])
        found, experts = exchange_rows(sent, self._given, self._taken, self._mesh), self._experts
        if not len(found):
            # The backward pass has collectives too, in which a rank without rows must take part.
            found, experts = found.sum(0, keepdim=True), experts.new_zeros(1)
        return found, experts[:, None], found.new_ones(len(found), 1)

    def combine_outputs(self, outputs: Tensor) -> Tensor:
        """Returns [tokens, H]: the weighted sum of the experts' outputs for each token."""
        found = exchange_rows(outputs[: len(self._experts)], self._taken, self._given, self._mesh)
        pairs = torch.empty_like(found).index_copy(0, self._order, found)
        added: Tensor = (pairs.unflatten(0, self._weights.shape) * self._weights[..., None]).sum(1)
        return added.to(outputs.dtype)
