"""The data-parallel ranks of a model: FSDP2 (arXiv 2304.11277) where there are several, nothing where there is one.

Parameters, gradients and optimizer state are cut into one shard a rank. A layer is gathered whole just before it
computes and its gradient is summed into shards right after, so every forward and every backward is collective: all
ranks run the same number of them, the last ones empty where a rank has fewer micro-batches. Without `reshard` layers
are gathered at the minibatch's first forward and gradients are summed at its end, for a whole model's memory on every
rank: ZeRO's stage 1 in place of 3 (arXiv 1910.02054).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented, and not listed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

BUCKET_BYTES = 256 << 20
"""Bytes of weights that are gathered at once."""


class Ranks:
    """One rank's view of its group. Without arguments: a process alone, where all of it does nothing."""

    def __init__(self, rank: int = 0, num_ranks: int = 1, mesh: DeviceMesh | None = None) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._mesh = mesh

    @classmethod
    def join(cls, url: str, secret: str = "", *, rank: int, num_ranks: int, device: str) -> Ranks:
        """Meets the others at `url`; returns once all are there. A process belongs to one group.

        url: `file://PATH` or `tcp://HOST:PORT`, where rank 0 listens at that address and no other. secret: what the
        names in the store begin with. Host tensors go through gloo, those of a GPU through NCCL.
        """
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        where = torch.device(device)
        if where.type == "cuda":
            torch.cuda.set_device(where)
            torch.cuda.init()
        backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
        store = distributed.PrefixStore(secret, _open_store(url, rank, num_ranks))  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
        mesh = init_device_mesh(where.type, (num_ranks,))
        return cls(rank, num_ranks, mesh)

    def leave(self) -> None:
        """Ends the group, for this process."""
        if not self.is_alone:
            from torch import distributed

            distributed.destroy_process_group()

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    def shard(self, model: nn.Module, *, reshard: bool) -> None:
        """Cuts the model, which is whole on the host and equal on every rank, into shards on the ranks' devices.

        reshard: after each forward and backward; else by `reshard` alone, and gradients are summed by `reduce` alone.
        """
        if self.is_alone:
            return
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(layer, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
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

        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.num_ranks)]
        distributed.all_gather(sizes, torch.tensor([len(own)]))
        longest = int(max(sizes))
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.num_ranks)]
        distributed.all_gather(found, nn.functional.pad(own, (0, longest - len(own))))
        return [bytes(each[: int(size)].tolist()).decode() for each, size in zip(found, sizes, strict=True)]

    def gather_on_first(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gathers whole tensors on rank 0's host, nothing on the others. Alone: the tensors themselves."""
        if self.is_alone:
            return tensors
        kept: dict[str, Tensor] = {}
        for bucket in _buckets(tensors):  # one after the other, so that no device holds the model
            kept.update(self._gather(bucket))
        return kept

    def _gather(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Gathers a bucket's whole tensors on rank 0's host, nothing on the others: a message a rank, not a tensor."""
        from torch import distributed

        if not _is_cut_by_rows(bucket[0][1]):
            wholes = [(name, whole_tensor(tensor)) for name, tensor in bucket]
            return [(name, whole.cpu()) for name, whole in wholes] if self.rank == 0 else []
        # Rows are dealt as torch.chunk does: with each rank's part as large as the first, what is missing comes last.
        sizes = [-(-len(tensor) // self.num_ranks) * (tensor.numel() // len(tensor)) for _, tensor in bucket]
        parts = [own_part(tensor.detach()).flatten() for _, tensor in bucket]
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


def _buckets(tensors: Mapping[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors alike in type and layout, in order, up to BUCKET_BYTES together; a larger one by itself."""
    bucket: list[tuple[str, Tensor]] = []
    held, before = 0, None
    for name, tensor in tensors.items():
        kind = (tensor.dtype, _is_cut_by_rows(tensor))
        if bucket and (kind != before or held + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held, before = held + tensor.nbytes, kind
    if bucket:
        yield bucket


def _is_cut_by_rows(tensor: Tensor) -> bool:
    """Says whether a tensor is cut as FSDP cuts parameters; what is computed of them may be laid out otherwise."""
    from torch.distributed.tensor import DTensor, Shard

    return isinstance(tensor, DTensor) and tuple(tensor.placements) == (Shard(0),)


def _sharded(model: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor from all ranks, which all call this function; returns another unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor, ranks: Ranks) -> range:
    """Returns the rows of a tensor that are this rank's: dealt as torch.chunk does; all of one that is not sharded."""
    from torch.distributed.tensor import DTensor

    num_rows = tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return range(num_rows)
    size = -(-num_rows // ranks.num_ranks)
    return range(min(ranks.rank * size, num_rows), min((ranks.rank + 1) * size, num_rows))


def own_part(tensor: Tensor) -> Tensor:
    """This rank's shard; all of a tensor that is not sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
