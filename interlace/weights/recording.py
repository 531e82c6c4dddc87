"""Traces a model's loader to find which block of which saved tensor fills which block of the model.

Models fuse projections, stack experts, tie heads and pad vocabularies as they load, each in a different way. Instead of
tables of names, the model's loader is run once on tensors without content. A view of such a tensor still identifies its
block, so each copy, concatenation and stack maps a block of a saved tensor to a block of the model. (The idea comes
from vLLM's sharded transfer, which replays operations; here they become boxes.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.core.errors import InterlaceError
from interlace.weights.plan import Box, Shard

Load = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]
"""A loader: maps saved tensors by name to the model's tensors by name."""
_aten = torch.ops.aten


class Landing(NamedTuple):
    """A block of a saved tensor, and the block of a model's tensor that it fills."""

    source: str
    source_box: Box
    target: str
    target_box: Box


@dataclass(slots=True, eq=False)
class _Memory:
    """A tensor's memory, with the origin of its content."""

    shape: tuple[int, ...]
    source: str | None = None
    """Name of the saved tensor in this memory; None for memory that the loader allocated."""
    filled: list[Landing] = field(default_factory=list)
    """Blocks written into the memory; a later one replaces an earlier one."""
    keeps: Any = None
    """The storage, kept alive during the recording so that its address is not reused."""


def record_load(
    load: Load, sources: Mapping[str, Shard], targets: Mapping[str, Tensor] | None = None
) -> tuple[Landing, ...]:
    """Runs a loader on saved tensors without content, and returns the traced landings.

    sources: the saved tensors, whole. targets: the model's tensors, if the loader copies into them; tensors that the
    loader makes need not be given. Unfilled tensors (padding, buffers) have no landing. Raises InterlaceError for a
    loader that does more than cut, join and copy: such a model must be loaded from a folder.
    """
    recorder = _Recorder()
    given = {}
    for name, shard in sources.items():
        given[name] = torch.empty(shard.shape, dtype=getattr(torch, shard.dtype), device="meta")
        recorder.know(given[name], _Memory(shape=shard.shape, source=name))
    for tensor in (targets or {}).values():
        recorder.know(tensor, _Memory(shape=tuple(tensor.shape)))
    with torch.no_grad(), recorder:
        made = load(given)
    return tuple(landing for name, tensor in made.items() for landing in recorder.landings(name, tensor))


def select_landings(landings: Sequence[Landing], needs: Sequence[Shard]) -> Mapping[str, Sequence[Landing]]:
    """Cuts landings down to blocks of the model's tensors, by tensor name. needs: the blocks, one for each tensor."""
    boxes = {shard.name: shard.box for shard in needs}
    found: dict[str, list[Landing]] = {name: [] for name in boxes}
    for landing in landings:
        box = boxes.get(landing.target)
        shared = box and landing.target_box.intersect(box)
        if shared is not None:
            source = _map_part(shared, landing.target_box, landing.source_box)
            found[landing.target].append(landing._replace(source_box=source, target_box=shared))
    return found


def find_unfilled(landings: Mapping[str, Sequence[Landing]], needs: Sequence[Shard]) -> list[str]:
    """Returns the names of the blocks of which landings leave out elements. landings: of select_landings()."""
    return [shard.name for shard in needs if not _is_filled(shard.box, landings[shard.name])]


def _is_filled(box: Box, landings: Sequence[Landing]) -> bool:
    return sum(prod(landing.target_box.size) for landing in landings) >= prod(box.size)


def join_landed(box: Box, landings: Sequence[Landing], blocks: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Assembles a block of a model's tensor from one saved block per landing; a single one is not copied.

    Raises InterlaceError if landings leave out elements, whose memory would be of no content.
    """
    if not _is_filled(box, landings):
        named = f" of {landings[0].target}" if landings else ""
        raise InterlaceError(f"weights: a block of shape {box.size}{named} has no content for some of its elements.")
    if len(landings) == 1:
        return next(iter(blocks)).reshape(box.size)
    whole = torch.empty(box.size, dtype=dtype)
    for landing, block in zip(landings, blocks, strict=True):
        whole[landing.target_box.within(box).slices] = block.reshape(landing.target_box.size)
    return whole


class _Recorder(TorchDispatchMode):
    """Intercepts every operation of the loader."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[int, _Memory] = {}

    def know(self, tensor: Tensor, memory: _Memory) -> None:
        """Registers a tensor's memory."""
        memory.keeps = tensor.untyped_storage()
        self._memories[memory.keeps._cdata] = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is _aten._to_copy.default and self._find_memory(args[0]) is not None:
            options["device"] = "meta"  # without content, a copy to a device is pointless
        result = func(*args, **options)
        if func is _aten.copy_.default:
            self._record_copy(args[0], args[1])
        elif func in (_aten.clone.default, _aten._to_copy.default):
            self._record_join(result, [(Box.of(result.shape), args[0])])
        elif func in (_aten.cat.default, _aten.stack.default):
            dim = args[1] if len(args) > 1 else 0
            self._record_join(
                result, list(_iterate_places(result, args[0], dim % result.ndim, func is _aten.stack.default))
            )
        return result

    def _record_copy(self, target: Tensor, source: Tensor) -> None:
        into, origin = self._find_memory(target), self._find_memory(source)
        if into is not None and origin is not None:
            self._fill_memory(into, _find_block(target, into.shape), source, origin)

    def _record_join(self, result: Tensor, inputs: Sequence[tuple[Box, Tensor]]) -> None:
        if all(self._find_memory(tensor) is None for _, tensor in inputs):
            return
        into = _Memory(shape=tuple(result.shape))
        self.know(result, into)
        for box, tensor in inputs:
            origin = self._find_memory(tensor)
            if origin is not None:
                self._fill_memory(into, box, tensor, origin)

    def _fill_memory(self, into: _Memory, box: Box, tensor: Tensor, origin: _Memory) -> None:
        into.filled = [kept for kept in into.filled if kept.target_box != box]
        into.filled += _trace_block("", box, _find_block(tensor, origin.shape), origin)

    def landings(self, name: str, tensor: Tensor) -> Iterator[Landing]:
        """Yields the landings that fill a model's tensor."""
        memory = self._find_memory(tensor)
        if memory is not None:
            whole = Box.of(tensor.shape)
            yield from _trace_block(name, whole, _find_block(tensor, memory.shape), memory)

    def _find_memory(self, tensor: Tensor) -> _Memory | None:
        return self._memories.get(tensor.untyped_storage()._cdata)


def _trace_block(target: str, target_box: Box, block: Box, memory: _Memory) -> Iterator[Landing]:
    """Yields the origins of a block of some memory, as landings in a block of a target."""
    if memory.source is not None:
        yield Landing(memory.source, block, target, target_box)
        return
    for landing in memory.filled:
        shared = landing.target_box.intersect(block)
        if shared is not None:
            source = _map_part(shared, landing.target_box, landing.source_box)
            yield Landing(landing.source, source, target, _map_part(shared, block, target_box))


def _map_part(part: Box, block: Box, other: Box) -> Box:
    """Returns the part of `other` that corresponds to a part of `block`; both have the same lengths except for 1s."""
    inner = part.within(block)
    moves = [(s, n) for s, n, length in zip(inner.start, inner.size, block.size, strict=True) if length > 1]
    start, size = list(other.start), list(other.size)
    axes = [axis for axis, length in enumerate(other.size) if length > 1]
    if [length for length in block.size if length > 1] != [other.size[axis] for axis in axes]:
        raise InterlaceError(f"weights: a loader reshapes {block.size} to {other.size}, which is no block of it.")
    for axis, (first, length) in zip(axes, moves, strict=True):
        start[axis], size[axis] = start[axis] + first, length
    return Box(tuple(start), tuple(size))


def _find_block(view: Tensor, shape: tuple[int, ...]) -> Box:
    """Returns the block of a contiguous tensor that a view covers. Raises InterlaceError if the view is not a block."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    start, left = [], int(view.storage_offset())
    for stride in strides:
        start.append(left // stride)
        left %= stride
    size, axis = [1] * len(shape), 0
    for length, stride in zip(view.shape, view.stride(), strict=True):
        if length == 1:
            continue
        while axis < len(shape) and (strides[axis] != stride or shape[axis] == 1):
            axis += 1
        if axis == len(shape) or start[axis] + length > shape[axis]:
            raise InterlaceError(
                f"weights: a loader takes {tuple(view.shape)} with strides {view.stride()} of a tensor of shape {shape}"
                ", which is no block of it (transposed, or joined over rows)."
            )
        size[axis] = length
        axis += 1
    return Box(tuple(start), tuple(size))


def _iterate_places(result: Tensor, inputs: Sequence[Tensor], dim: int, stacks: bool) -> Iterator[tuple[Box, Tensor]]:
    first = 0
    for tensor in inputs:
        length = 1 if stacks else tensor.shape[dim]
        start, size = [0] * result.ndim, list(result.shape)
        start[dim], size[dim] = first, length
        yield Box(tuple(start), tuple(size)), tensor
        first += length
