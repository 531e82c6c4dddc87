"""The ranks of a model: a mesh of processes, or one alone.

Samples are dealt to data-parallel ranks; ranks that differ in the last axes of the mesh are called with the same ones
(`MeshShape`). Over the data-parallel ranks a model is cut up by FSDP2 (arXiv 2304.11277): parameters, gradients and
optimizer state are cut into one shard a rank. A layer is gathered whole just before it computes and its gradient is
summed into shards right after, so every forward and every backward is collective: all ranks run the same number of
them, the last ones empty where a rank has fewer micro-batches. Without `reshard` layers are gathered at the minibatch's
first forward and gradients are summed at its end, for a whole model's memory on every rank: ZeRO's stage 1 in place of
3 (arXiv 1910.02054).
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

import torch
from torch import nn

from interlace.engines.train.config import MeshShape
from interlace.models.expert_parallel import expert_modules
from interlace.models.loading import LoadedModel, load_model
from interlace.weights.saved import load_without_content
from interlace.weights.shards import local_part

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented, and not listed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from interlace.models.config import ModelConfig

Fill: TypeAlias = Callable[[nn.Module], None]
REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
"""Axes of the mesh."""
REST, EXPERT = "rest", "expert"
"""Axes that SHARD is made of for the experts of a mixture."""
BUCKET_BYTES = 256 << 20
"""Bytes of weights that are gathered at once."""


class Ranks:
    """One rank's view of its group. Without arguments: a process alone, where all of it does nothing."""

    def __init__(self, rank: int = 0, shape: MeshShape | None = None, mesh: DeviceMesh | None = None) -> None:
        self.rank, self.shape = rank, shape or MeshShape()
        self.num_ranks = self.shape.num_ranks
        self.fill: Fill | None = None
        """Reader of this rank's part of a model that has no content yet; None for one that was loaded whole."""
        self.context_mesh: DeviceMesh | None = None
        """Ranks that share each row of tokens with this one; None where it has rows of its own."""
        self._mesh, self._expert_mesh = mesh, None if mesh is None else _expert_mesh(self.shape, mesh.device_type)

    @classmethod
    def join(cls, url: str, secret: str = "", *, rank: int, shape: MeshShape, device: str) -> Ranks:
        """Meets the others at `url`; returns once all are there. A process belongs to one group.

        url: `file://PATH` or `tcp://HOST:PORT`, where rank 0 listens at that address and no other. secret: what the
        names in the store begin with. Host tensors go through gloo, those of a GPU through NCCL.
        """
        from torch import distributed

        where, num_ranks = torch.device(device), shape.num_ranks
        if where.type == "cuda":
            torch.cuda.set_device(where)
            torch.cuda.init()
        backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
        store = distributed.PrefixStore(secret, _open_store(url, rank, num_ranks))  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
        return cls.over(rank, shape, where.type)

    @classmethod
    def over(cls, rank: int, shape: MeshShape, kind: str = "cpu") -> Ranks:
        """Lays a mesh over the ranks, which have met. kind: of their devices."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {REPLICATE: shape.replicate, SHARD: shape.shard * shape.context, TENSOR: shape.tensor}
        # Axes of one rank are left out: with no more than one axis a tensor is laid out as FSDP alone does.
        axes = {name: size for name, size in sizes.items() if size > 1} or {SHARD: 1}
        mesh = init_device_mesh(kind, (*axes.values(),), mesh_dim_names=(*axes,))
        made = cls(rank, shape, mesh)
        if shape.context > 1:
            rows = (shape.replicate * shape.shard, shape.context, shape.tensor)
            made.context_mesh = init_device_mesh(kind, rows, mesh_dim_names=("rows", "context", TENSOR))["context"]
        return made

    def leave(self) -> None:
        """Ends the group, for this process."""
        if not self.is_alone:
            from torch import distributed

            distributed.destroy_process_group()

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    def is_first_holder(self, tensor: Tensor) -> bool:
        """Says whether this rank, of all that hold the same part of a tensor, is the first."""
        if self._mesh is None:
            return True
        axes = zip(self._mesh.mesh_dim_names or (), self._mesh.get_coordinate() or (), strict=True)
        cut = sharded_axes(tensor)
        cut |= {SHARD} if EXPERT in cut else frozenset()
        return all(name in cut or at == 0 for name, at in axes)

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """Returns the axis of the ranks that share each layer; None for one that has them whole."""
        return None if self._mesh is None or self.shape.tensor == 1 else self._mesh[TENSOR]

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """Returns the axis of the ranks that experts are dealt out to; None where each rank has all of them."""
        return None if self._expert_mesh is None else self._expert_mesh[EXPERT]

    def load(self, config: ModelConfig) -> LoadedModel:
        """Loads a model. Of several ranks each gets it without content, if that can be, and reads its part later."""
        found = None if self.is_alone else load_without_content(config, is_checked=self.rank == 0)
        if found is None:
            return load_model(config)
        self.fill = found[1].fill
        return found[0]

    def shard(self, model: nn.Module, device: torch.device, *, reshard: bool) -> None:
        """Cuts the model, which is on the host and equal on every data-parallel rank, into shards on their devices.

        A model without content is cut up first, and then each rank reads its part. reshard: after each forward and
        backward; else by `reshard` alone, and gradients are summed by `reduce` alone.
        """
        names = self._mesh.mesh_dim_names if self._mesh else None
        axes = tuple(name for name in names or () if name != TENSOR)
        if self._mesh is not None and axes:
            dealt = self._shard_experts(model, device)
            self._shard_over(self._mesh if axes == names else self._mesh[axes], model, reshard=reshard, dealt=dealt)
        if self.fill:
            _materialize(model, device)
            self.fill(model)
        elif not axes:  # sharding brings each rank's part to its device, where the whole may not fit
            nn.Module.to(model, device)

    def _shard_experts(self, model: nn.Module, device: torch.device) -> set[nn.Parameter]:
        """Cuts each dealt expert up among the ranks that hold it, if there are several; returns what must not be cut up
        with the layer around it."""
        if self._expert_mesh is None:
            return set()
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard

        axes = (REPLICATE, REST) if self.shape.replicate > 1 else (REST,)
        found = expert_modules(model)
        for module in found:
            if self._expert_mesh[axes].size() > 1:
                # Along another dimension than the one that they were dealt out by: a rank's part is one block then.
                fully_shard(module, mesh=self._expert_mesh[axes], shard_placement_fn=lambda _: Shard(1))
            elif not self.fill:
                module.to(device)
        return {parameter for module in found for parameter in module.parameters()}

    def _shard_over(
        self, mesh: DeviceMesh, model: nn.Module, *, reshard: bool, dealt: set[nn.Parameter] | None = None
    ) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(layer, mesh=mesh, ignored_params=dealt)
        fully_shard(model, mesh=mesh, ignored_params=dealt)
        # Logits are a view of what the head's product gave. Nothing is added to them where gradients are recorded.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        for module in _sharded(model):
            # Gradients are sums, divided once by the denominator of all ranks; FSDP would average.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_forward(reshard, recurse=False)
            module.set_reshard_after_backward(reshard, recurse=False)
            module.set_requires_gradient_sync(reshard, recurse=False)

    def reshard(self, model: nn.Module) -> None:
        """Gives up gathered parameters, which the next update would not reach."""
        if not self.is_alone:
            for module in _sharded(model):
                module.reshard()

    def reduce(self, model: nn.Module, last: Tensor) -> None:
        """Sums the gradients of a model that was not resharded, in the backward of `last`, which reaches all of it."""
        modules = _sharded(model)
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)
        last.backward()
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.reshard()

    def largest(self, number: int) -> int:
        """Returns the largest over all ranks."""
        return number if self.is_alone else max(map(int, self.gather_texts(str(number))))

    def gather_texts(self, text: str) -> list[str]:
        """Returns each rank's text, in their order, on every rank. For small things; nothing is unpickled."""
        if self.is_alone:
            return [text]
        from torch import distributed

        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.num_ranks)]
        distributed.all_gather(sizes, torch.tensor([len(own)]))
        longest = max(1, int(max(sizes)))
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.num_ranks)]
        distributed.all_gather(found, nn.functional.pad(own, (0, longest - len(own))))
        return [bytes(each[: int(size)].tolist()).decode() for each, size in zip(found, sizes, strict=True)]

    def gather_on_first(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gathers whole tensors on rank 0's host, nothing on the others. Alone: the tensors themselves."""
        if self.is_alone:
            return tensors
        kept: dict[str, Tensor] = {}
        for bucket in _buckets(tensors, self.num_ranks):  # one after the other, so that no device holds the model
            kept.update(self._gather(bucket))
        return kept

    def _gather(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Gathers a bucket's whole tensors on rank 0's host, nothing on the others: a message a rank, not a tensor."""
        from torch import distributed

        if not _is_cut_by_rows(bucket[0][1], self.num_ranks):
            wholes = [(name, whole_tensor(tensor)) for name, tensor in bucket]
            # Copies all of them: what is whole on every rank goes on being trained.
            return [(name, torch.clone(whole).cpu()) for name, whole in wholes] if self.rank == 0 else []
        # Rows are dealt as torch.chunk does: with each rank's part as large as the first, what is missing comes last.
        sizes = [-(-len(tensor) // self.num_ranks) * (tensor.numel() // len(tensor)) for _, tensor in bucket]
        parts = [local_part(tensor).flatten() for _, tensor in bucket]
        flat = torch.cat(
            [nn.functional.pad(part, (0, size - len(part))) for part, size in zip(parts, sizes, strict=True)]
        )
        if self.rank:
            distributed.gather(flat, dst=0)
            return []
        found = [torch.empty_like(flat) for _ in range(self.num_ranks)]
        distributed.gather(flat, found, dst=0)
        pieces = zip(*(each.split(sizes) for each in found), strict=True)
        return [
            (name, torch.cat(its)[: tensor.numel()].view(tensor.shape).cpu())
            for (name, tensor), its in zip(bucket, pieces, strict=True)
        ]


def _expert_mesh(shape: MeshShape, kind: str) -> DeviceMesh | None:
    """Lays out the same ranks as the experts of a mixture see them; None where each rank has all experts."""
    if shape.expert == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (shape.replicate, shape.rest, shape.expert)
    return init_device_mesh(kind, sizes, mesh_dim_names=(REPLICATE, REST, EXPERT))


def _open_store(url: str, rank: int, num_ranks: int) -> Store:
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    place = urlsplit(url)
    if place.scheme == "file":
        return FileStore(place.path, num_ranks)
    if place.hostname is None or place.port is None:
        raise ValueError(f"{url} is neither file://PATH nor tcp://HOST:PORT")
    # The store would listen on all addresses of the machine, and it asks for no password.
    listener = socket.create_server((place.hostname, place.port)).detach() if rank == 0 else None
    return TCPStore(place.hostname, place.port, num_ranks, is_master=rank == 0, master_listen_fd=listener)


def _buckets(tensors: Mapping[str, Tensor], num_ranks: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors alike in type and layout, in order, up to BUCKET_BYTES together; a larger one by itself."""
    bucket: list[tuple[str, Tensor]] = []
    held, before = 0, None
    for name, tensor in tensors.items():
        kind = (tensor.dtype, _is_cut_by_rows(tensor, num_ranks))
        if bucket and (kind != before or held + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held, before = held + tensor.nbytes, kind
    if bucket:
        yield bucket


def _is_cut_by_rows(tensor: Tensor, num_ranks: int) -> bool:
    """Says whether all ranks have some of a tensor's rows, one after the other; others are laid out otherwise."""
    from torch.distributed.tensor import DTensor, Shard

    is_cut = isinstance(tensor, DTensor) and tuple(tensor.placements) == (Shard(0),)
    return is_cut and tensor.device_mesh.size() == num_ranks  # type: ignore[attr-defined]


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Gives memory to what has none; a tied tensor stays one, which torch's own `to_empty` makes two of."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None and held.is_meta:
                empty = nn.Parameter(torch.empty_like(held, device=device), requires_grad=held.requires_grad)
                module._parameters[name] = made.setdefault(id(held), empty)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                empty_or_moved = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                module._buffers[name] = empty_or_moved
    model._apply(lambda tensor: tensor)  # tells FSDP where its shards are now


def _sharded(model: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor from all ranks, which all call this function; returns another unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_axes(tensor: Tensor) -> frozenset[str]:
    """Returns the mesh's axes along which a tensor is cut up."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    return frozenset(name for name, place in zip(names, tensor.placements, strict=True) if not place.is_replicate())
