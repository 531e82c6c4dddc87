"""The ranks of a model: a mesh of processes, or one alone.

Data-parallel ranks get different samples; ranks that differ in the last axes of the mesh are called with the same
samples (`MeshShape`). FSDP2 (arXiv 2304.11277) splits a model over the data-parallel ranks: parameters, gradients and
optimizer state are cut into one shard per rank. A layer is gathered just before it computes, and its gradient is summed
into shards right after. So every forward and every backward is collective: all ranks run the same number of them, and a
rank with fewer micro-batches runs empty ones at the end. Without `reshard`, layers are gathered at the minibatch's
first forward and gradients are summed at its end, at the cost of a whole model's memory on every rank: ZeRO stage 1
instead of stage 3 (arXiv 1910.02054).
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

import torch
from torch import Tensor, distributed, nn

from interlace.engines.train.config import MeshShape
from interlace.models.expert_parallel import expert_modules
from interlace.models.loading import LoadedModel, load_model
from interlace.weights.saved import load_without_content
from interlace.weights.shards import local_part

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented, and not listed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from interlace.models.config import ModelConfig

Fill: TypeAlias = Callable[[nn.Module], None]
REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
"""Axes of the mesh."""
REST, EXPERT = "rest", "expert"
"""Axes that form SHARD for the experts of a mixture."""
BUCKET_BYTES = 256 << 20
"""Bytes of weights gathered at once."""


class Ranks:
    """One rank's view of its group. Without arguments, a single process, for which all methods do nothing."""

    def __init__(self, rank: int = 0, shape: MeshShape | None = None, mesh: DeviceMesh | None = None) -> None:
        self.rank, self.shape = rank, shape or MeshShape()
        self.num_ranks = self.shape.num_ranks
        self.fill: Fill | None = None
        """Reader of this rank's part of a model without content; None for a model that was loaded whole."""
        self.context_mesh: DeviceMesh | None = None
        """Ranks that share each row of tokens with this one; None if rows are not shared."""
        self._mesh, self._expert_mesh = mesh, None if mesh is None else _expert_mesh(self.shape, mesh.device_type)

    @classmethod
    def join(cls, url: str, secret: str = "", *, rank: int, shape: MeshShape, device: str) -> Ranks:
        """Joins the group at `url`; returns when all ranks have joined. A process belongs to one group.

        url: `file://PATH` or `tcp://HOST:PORT`; rank 0 listens at that address only. secret: prefix of the keys in the
        store. Host tensors are sent through gloo, GPU tensors through NCCL.
        """
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
        """Makes a mesh of the ranks, which have joined a group. kind: kind of their devices."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {REPLICATE: shape.replicate, SHARD: shape.shard * shape.context, TENSOR: shape.tensor}
        # Axes of size 1 are left out: with one axis, a tensor's layout is the same as under FSDP alone.
        axes = {name: size for name, size in sizes.items() if size > 1} or {SHARD: 1}
        mesh = init_device_mesh(kind, (*axes.values(),), mesh_dim_names=(*axes,))
        made = cls(rank, shape, mesh)
        if shape.context > 1:
            rows = (shape.replicate * shape.shard, shape.context, shape.tensor)
            made.context_mesh = init_device_mesh(kind, rows, mesh_dim_names=("rows", "context", TENSOR))["context"]
        return made

    def leave(self) -> None:
        if not self.is_alone:
            distributed.destroy_process_group()

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    def is_first_holder(self, tensor: Tensor) -> bool:
        """Returns True if this rank is the first of all ranks that hold the same part of a tensor."""
        if self._mesh is None:
            return True
        axes = zip(self._mesh.mesh_dim_names or (), self._mesh.get_coordinate() or (), strict=True)
        cut = find_sharded_axes(tensor)
        cut |= {SHARD} if EXPERT in cut else frozenset()
        return all(name in cut or at == 0 for name, at in axes)

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """Returns the axis of the ranks that share each layer; None if each rank has whole layers."""
        return None if self._mesh is None or self.shape.tensor == 1 else self._mesh[TENSOR]

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """Returns the axis of the ranks that split the experts; None if each rank has all experts."""
        return None if self._expert_mesh is None else self._expert_mesh[EXPERT]

    def load(self, config: ModelConfig) -> LoadedModel:
        """Loads a model. With several ranks, each gets it without content, if possible, and reads its part later."""
        found = None if self.is_alone else load_without_content(config, is_checked=self.rank == 0)
        if found is None:
            return load_model(config)
        self.fill = found[1].fill
        return found[0]

    def shard(self, model: nn.Module, device: torch.device, *, reshard: bool) -> None:
        """Cuts the model, which is on the host and equal on every data-parallel rank, into shards on their devices.

        A model without content is cut up first, and then each rank reads its part. reshard: parameters are resharded
        after each forward and backward; if False, only `reshard` does so, and only `reduce` sums gradients.
        """
        names = self._mesh.mesh_dim_names if self._mesh else None
        axes = tuple(name for name in names or () if name != TENSOR)
        if self._mesh is not None and axes:
            dealt = self._shard_experts(model, device)
            self._shard_over(self._mesh if axes == names else self._mesh[axes], model, reshard=reshard, dealt=dealt)
        if self.fill:
            _allocate_tensors(model, device)
            self.fill(model)
        elif not axes:  # sharding moves each rank's part to its device, on which the whole model may not fit
            nn.Module.to(model, device)

    def _shard_experts(self, model: nn.Module, device: torch.device) -> set[nn.Parameter]:
        """Cuts each expert up among the ranks that hold it, if there are several; returns the experts' parameters,
        which must not be cut up again with their layer."""
        if self._expert_mesh is None:
            return set()
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard

        axes = (REPLICATE, REST) if self.shape.replicate > 1 else (REST,)
        found = expert_modules(model)
        for module in found:
            if self._expert_mesh[axes].size() > 1:
                # Along another dimension than the experts' dimension: a rank's part is then one block.
                fully_shard(module, mesh=self._expert_mesh[axes], shard_placement_fn=lambda _: Shard(1))
            elif not self.fill:
                module.to(device)
        return {parameter for module in found for parameter in module.parameters()}

    def _shard_over(self, mesh: DeviceMesh, model: nn.Module, *, reshard: bool, dealt: set[nn.Parameter]) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(layer, mesh=mesh, ignored_params=dealt)
        fully_shard(model, mesh=mesh, ignored_params=dealt)
        # Logits are a view of the output of the head. No in-place addition follows when gradients are recorded.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        for module in _find_sharded(model):
            # Gradients are sums, divided once by the denominator of all ranks; FSDP would average them.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_forward(reshard, recurse=False)
            module.set_reshard_after_backward(reshard, recurse=False)
            module.set_requires_gradient_sync(reshard, recurse=False)

    def reshard(self, model: nn.Module) -> None:
        """Frees gathered parameters, because the next update would not change them."""
        if not self.is_alone:
            for module in _find_sharded(model):
                module.reshard()

    def reduce(self, model: nn.Module, last: Tensor) -> None:
        """Sums the gradients of a model that was not resharded, in the backward of `last`, which reaches all of it."""
        modules = _find_sharded(model)
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)
        last.backward()
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.reshard()

    def largest(self, number: int) -> int:
        return number if self.is_alone else max(map(int, self.gather_texts(str(number))))

    def gather_texts(self, text: str) -> list[str]:
        """Returns the text of each rank, in rank order, on every rank. For short texts; nothing is unpickled."""
        if self.is_alone:
            return [text]
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.num_ranks)]
        distributed.all_gather(sizes, torch.tensor([len(own)]))
        longest = max(1, int(max(sizes)))
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.num_ranks)]
        distributed.all_gather(found, nn.functional.pad(own, (0, longest - len(own))))
        return [bytes(each[: int(size)].tolist()).decode() for each, size in zip(found, sizes, strict=True)]

    def gather_on_first(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gathers whole tensors on rank 0's host; other ranks get none. A single process gets the tensors given."""
        if self.is_alone:
            return tensors
        kept: dict[str, Tensor] = {}
        for bucket in _split_buckets(tensors, self.num_ranks):  # one by one, so that no device holds the whole model
            kept.update(self._gather_bucket(bucket))
        return kept

    def _gather_bucket(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Gathers a bucket's whole tensors on rank 0's host, with one message per rank, not per tensor."""
        if not _is_cut_by_rows(bucket[0][1], self.num_ranks):
            wholes = [(name, whole_tensor(tensor)) for name, tensor in bucket]
            # Copies all of them: tensors that are whole on every rank continue to be trained.
            return [(name, torch.clone(whole).cpu()) for name, whole in wholes] if self.rank == 0 else []
        # Rows are split as by torch.chunk. With parts as large as the first one, padding is at the end.
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
    """Makes the mesh of the same ranks with the axes of experts; None if each rank has all experts."""
    from torch.distributed.device_mesh import init_device_mesh

    if shape.expert == 1:
        return None
    sizes = (shape.replicate, shape.rest, shape.expert)
    return init_device_mesh(kind, sizes, mesh_dim_names=(REPLICATE, REST, EXPERT))


def _open_store(url: str, rank: int, num_ranks: int) -> Store:
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    place = urlsplit(url)
    if place.scheme == "file":
        return FileStore(place.path, num_ranks)
    if place.hostname is None or place.port is None:
        raise ValueError(f"{url} is neither file://PATH nor tcp://HOST:PORT")
    # The store by default listens on all addresses of the machine, and it has no password.
    listener = socket.create_server((place.hostname, place.port)).detach() if rank == 0 else None
    return TCPStore(place.hostname, place.port, num_ranks, is_master=rank == 0, master_listen_fd=listener)


def _split_buckets(tensors: Mapping[str, Tensor], num_ranks: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields tensors of equal type and layout, in order, up to BUCKET_BYTES together; a larger one by itself."""
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
    """Returns True if all ranks have some of a tensor's rows, one rank after the other."""
    from torch.distributed.tensor import DTensor, Shard

    is_cut = isinstance(tensor, DTensor) and tuple(tensor.placements) == (Shard(0),)
    return is_cut and tensor.device_mesh.size() == num_ranks  # type: ignore[attr-defined]


def _allocate_tensors(model: nn.Module, device: torch.device) -> None:
    """Allocates memory for meta tensors. A tied tensor stays one tensor; torch's `to_empty` would split it in two."""
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
    model._apply(lambda tensor: tensor)  # updates the addresses of FSDP's shards


def _find_sharded(model: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor; all ranks must call this function. Returns any other tensor unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def find_sharded_axes(tensor: Tensor) -> frozenset[str]:
    """Returns the mesh's axes along which a tensor is cut up."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    return frozenset(name for name, place in zip(names, tensor.placements, strict=True) if not place.is_replicate())
