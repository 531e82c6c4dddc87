"""Replacement of a serving model's weights: all or none, without a second full copy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from interlace.core.errors import UserError, nearest
from interlace.core.state_parts import WEIGHTS
from interlace.engines.rollout.named_weights import GivenWeights, NamedWeights
from interlace.engines.rollout.runner import Runner
from interlace.models.residence import Move, Residence
from interlace.weights.content import content_hash
from interlace.weights.ref import FACTORS, AdapterBase
from interlace.weights.shards import shards_of

_KEPT = "The update is refused as a whole; the old weights keep serving."


class LiveWeights:
    """The model's parameters and persistent buffers by their Hugging Face names; tied names share one tensor."""

    def __init__(self, model: nn.Module, *, keeps_addresses: bool = False) -> None:
        """keeps_addresses: copies every update into the present memory, at whose addresses CUDA graphs read."""
        self._keeps_addresses = keeps_addresses
        whole: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._tensors = {name: replaceable_part(tensor) for name, tensor in whole.items()}
        """This rank's part of each tensor, if ranks share layers."""
        self.names = frozenset(whole)
        """Names of all tensors; a tied tensor appears under each of its names."""
        canonical: dict[int, str] = {}
        self._same_as = {name: canonical.setdefault(id(tensor), name) for name, tensor in whole.items()}
        """Name -> the first name of the same tensor: an update needs one of the tied names."""
        parameters = {name for name, _ in model.named_parameters()}
        self._required = [name for name in dict.fromkeys(self._same_as.values()) if name in parameters]
        """Names that an update must contain. Buffers are optional, because training does not change them."""
        firsts = dict.fromkeys(self._same_as.values())
        self.shards = shards_of({name: whole[name] for name in firsts})
        """Description of an update: this rank's part of each tensor."""
        self._borrowed: set[str] = set()
        """First names of tensors whose memory came with an update. Other engines may serve from it, so it is never
        written."""
        self._base: dict[str, Tensor] = {}
        """Name -> the tensor without the merged adapter, for each layer that has one."""
        self._beside: dict[int, dict[str, Tensor]] = {}
        """Older version in use -> its tensors of the layers with an adapter."""
        self._newest: dict[str, Tensor] = {}
        """Tensors of the newest version while an older one is installed."""
        self._known_bases: set[str] = set()
        """Checksums that were compared with the base."""
        self.residence = Residence(next(model.parameters()).device, {WEIGHTS: self.relocate})

    @property
    def num_bytes(self) -> int:
        """Returns the bytes on the device."""
        held = [*(self._tensors[name] for name in set(self._same_as.values())), *self._base.values()]
        held += [tensor for beside in self._beside.values() for tensor in beside.values()]
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in held}  # The base may be a version itself.
        return 0 if self.residence.is_away(WEIGHTS) else sum(sizes.values())

    def relocate(self, move: Move) -> None:
        """Replaces each tensor's memory by the memory of its copy."""
        for name in dict.fromkeys(self._same_as.values()):
            self._tensors[name].data = move(self._tensors[name].detach())
        kept = [self._base, *self._beside.values()]  # The base may be a version itself.
        moved = {key: move(tensor) for key, tensor in {id(each): each for of in kept for each in of.values()}.items()}
        for of in kept:
            of.update({name: moved[id(tensor)] for name, tensor in of.items()})
        self._borrowed.clear()

    def update(self, tensors: NamedWeights | Mapping[str, Tensor], *, frozen: bool) -> None:
        """Replaces all tensors. Raises UserError, without a change, for a missing or unknown name or a different shape.

        frozen: the given tensors are never written again, so tensors of matching type and device are kept instead of
        copied.
        """
        weights = GivenWeights(tensors) if isinstance(tensors, Mapping) else tensors
        self.check(weights)
        for name, tensor in weights:
            self.replace(name, tensor, frozen=frozen)
        self._base.clear()
        self._beside.clear()
        self._known_bases.clear()

    @torch.no_grad()
    def merge(self, factors: Mapping[str, Tensor], bases: Sequence[AdapterBase], *, keeps: int | None = None) -> None:
        """Adds an adapter to the loaded weights, in place of the previous one. factors: both factors of each layer.

        Layers with an adapter are then stored twice, without it and with it. keeps: the current version if it is in
        use; its layers are kept until let_go(). Raises UserError, without a change, for an adapter of other layers or
        on another base.
        """
        self._check_base(bases)
        base, beside = bases[0], dict[str, Tensor]()
        if keeps is not None:
            self._beside[keeps] = beside
        for layer in dict.fromkeys(name.rsplit(".", 2)[0] for name in factors):
            name = f"{layer}.weight"
            down, up = (factors[f"{layer}.{half}.weight"].to(self._tensors[name].device) for half in FACTORS)
            change = (up @ down).T if base.is_turned else up @ down
            plain = self._base.get(name)
            if plain is None:
                plain = self._base[name] = self._tensors[name].detach()
                self._tensors[name].data = torch.empty_like(plain)
                self._borrowed.discard(self._same_as[name])
                beside[name] = plain
            elif keeps is not None:
                beside[name] = self._tensors[name].detach()
                self._tensors[name].data = torch.empty_like(plain)
            self._tensors[name].detach().copy_(plain + change * base.scale)

    def serve(self, version: int | None) -> None:
        """Installs an older version that is in use, until serve(None)."""
        for name, tensor in (self._newest if version is None else self._beside[version]).items():
            if version is not None:
                self._newest.setdefault(name, self._tensors[name].detach())
            self._tensors[name].data = tensor
        if version is None:
            self._newest.clear()

    @property
    def versions(self) -> frozenset[int]:
        """Returns the older versions in memory."""
        return frozenset(self._beside)

    def let_go(self, version: int) -> None:
        """Drops an older version that is no longer used."""
        del self._beside[version]

    def _check_base(self, bases: Sequence[AdapterBase]) -> None:
        for base in bases:
            if base.checksum in self._known_bases:
                continue
            unknown = [shard.name for shard in base.shards if shard.name not in self._tensors]
            if unknown:
                raise UserError(f"adapter: unknown layer {unknown[0]!r}.{nearest(unknown[0], self._tensors)} {_KEPT}")
            other = self._base.keys() ^ {shard.name for shard in base.shards}
            if self._base and other:  # a layer that the new adapter leaves out would keep the previous one
                raise UserError(
                    f"adapter: the previous one and this one have other layers, such as {min(other)!r}. {_KEPT} Load "
                    "whole weights first, or give both the same actor.lora.target_modules."
                )
            own = (self._base.get(shard.name, self._tensors[shard.name])[shard.box.slices] for shard in base.shards)
            if content_hash(own) != base.checksum:
                raise UserError(
                    "adapter: the engine's base is to the bit another than the one that the adapter was trained on. "
                    f"{_KEPT} Load both from the same files in the same type, or set weights.adapter=merged."
                )
            self._known_bases.add(base.checksum)

    def replace(self, name: str, tensor: Tensor, *, frozen: bool) -> None:
        """Replaces one tensor of a checked update."""
        held, given, first = self._tensors[name], tensor.detach(), self._same_as[name]
        alike = given.dtype == held.dtype and given.device == held.device and given.is_contiguous()
        if frozen and alike and not self._keeps_addresses:
            held.data = given
            self._borrowed.add(first)
        elif first in self._borrowed:
            held.data = torch.empty_like(held, requires_grad=False).copy_(given)
            self._borrowed.discard(first)
        else:
            held.detach().copy_(given)

    def check(self, weights: NamedWeights) -> None:
        """Raises UserError for an update that does not fit the model. Reads only tensors that the model ties."""
        for name, shape in weights.shapes.items():
            if name not in self._tensors:
                raise UserError(f"weight update: unknown name {name!r}.{nearest(name, self._tensors)} {_KEPT}")
            own = tuple(self._tensors[name].shape)
            if shape != own:
                raise UserError(f"weight update: {name} has shape {shape}, the model's is {own}. {_KEPT}")
        given: dict[str, str] = {}
        for name in weights.shapes:
            first = given.setdefault(self._same_as[name], name)
            if first != name and not torch.equal(weights.read(first), weights.read(name)):
                raise UserError(
                    f"weight update: {first} and {name} are one tensor in the engine's model and differ in the update:"
                    f" one model ties them and the other does not. {_KEPT} Load both with the same tie_word_embeddings."
                )
        missing = [name for name in self._required if name not in given]
        if missing:
            some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise UserError(f"weight update: missing {some}. {_KEPT} Send every parameter of the model.")


def replaceable_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor, whose memory can be replaced; any other tensor unchanged."""
    from torch.distributed.tensor import DTensor

    # Not to_local(): in torch 2.13 and later it returns a view of a parameter, whose replacement would not be served.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class InstalledVersions:
    """Installs the weights that a forward pass needs, and gives the runner their addresses."""

    def __init__(self, weights: LiveWeights, runner: Runner) -> None:
        self._weights, self._runner = weights, runner
        self.newest = 0
        """Version of the weights that new sequences are sampled with."""
        self._bindings: dict[int, object] = {}
        """Runner bindings (weight addresses) of each older version in use."""

    def rebind(self) -> None:
        """Finds the addresses of the weights again, after they or the KV cache have moved."""
        self._runner.rebind()
        self._bindings = {}

    @contextmanager
    def install(self, version: int | None) -> Iterator[int]:
        """Installs the weights of an older version for the sequences that began with it. None: the newest version."""
        if version is None:
            yield self.newest
            return
        newest = self._runner.binding
        self._weights.serve(version)
        if version in self._bindings:
            self._runner.binding = self._bindings[version]
        else:
            self._runner.rebind()
            self._bindings[version] = self._runner.binding
        try:
            yield version
        finally:
            self._weights.serve(None)
            self._runner.binding = newest

    def drop_unused(self, used: Iterable[int | None]) -> None:
        """Drops the older versions that no sequence uses. used: versions in use."""
        for version in self._weights.versions - {*used}:
            self._weights.let_go(version)
            self._bindings.pop(version, None)
