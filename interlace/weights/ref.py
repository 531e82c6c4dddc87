"""Descriptions of weights that the controller passes on: a version, and the addresses of its parts. No torch."""

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeGuard

from interlace.weights.config import WeightsConfig
from interlace.weights.plan import Shard

FACTORS = ("lora_A", "lora_B")
"""Names of an adapter's two factors, between the name of the layer and `weight`, as in peft's files."""
UpdateMode: TypeAlias = Literal["keep", "recompute", "own"]
"""Treatment of running sequences when weights change. keep: they continue under the new weights with the existing KV
cache. recompute: they continue with a recomputed KV cache. own: each ends under the weights that it began with, which
are kept in memory until then. `own` is for adapters that are sent alone."""
_SHARED = Path("/dev/shm")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Location of a sender or receiver of weights."""

    memory: str
    """Identifier of the memory that processes can share by files; empty on a system without such a folder."""
    process: int

    @classmethod
    def here(cls) -> "Place":
        """Returns the place of this process."""
        try:
            memory = f"{_BOOT.read_text().strip()}:{_SHARED.stat().st_dev}"  # containers may each mount their own
        except OSError:
            memory = ""
        return cls(memory=memory, process=os.getpid())


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Transfer settings of a run's weights, as the controller chose them."""

    transport: str
    config: WeightsConfig
    reason: str = ""
    """Reason for the choice of the transport, for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBase:
    """Weights that the factors of an adapter are added to. An engine has loaded them, and they never change."""

    scale: float
    """Factor of the product of both factors, alpha / rank."""
    is_turned: bool
    """True if weights are [inputs, outputs], so that the product must be transposed."""
    shards: Sequence[Shard]
    """Blocks of the layers' frozen weights that the trainer rank holds."""
    checksum: str
    """Hash of these blocks: an engine with another base rejects the adapter."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightPart:
    """One trainer rank's part of a version: its shards, and the address to fetch them from."""

    tensors_within: ClassVar = ("source", "behind")
    version: int
    rank: int
    shards: Sequence[Shard]
    """Blocks that the rank holds, in the served dtype."""
    transport: str
    codec: str
    """Encoding of the content; `raw` for a version that the `delta` codec sends whole."""
    source: object
    """Address of the content; its type depends on the transport."""
    checksum: str
    """Hash of the content."""
    chain_hash: str
    """Hash of the version's tensors by their origin: for a delta, of its base's chain_hash and its own checksum; else
    the checksum. Deltas with equal content on different tensors differ in it."""
    frozen: bool = True
    """False if the content is the trainer's memory, which its next update changes."""
    num_bytes: int = 0
    """Bytes of the content."""
    base: int | None = None
    """Version that a delta is applied to."""
    is_base: bool = False
    """True for a part sent whole to which later deltas may be applied."""
    behind: "tuple[WeightPart, ...]" = ()
    """For a delta: the last whole part and the deltas after it, so that a late reader finds everything it needs."""
    seconds: float = 0.0
    """Time that writing the part took, in seconds."""
    adapter: AdapterBase | None = None
    """Base of an adapter that is sent alone; None for whole weights."""

    @classmethod
    def simulated(cls, version: int, *, is_adapter: bool = False) -> "WeightPart":
        """Makes a part without content, for a simulated trainer."""
        base = AdapterBase(scale=1.0, is_turned=False, shards=(), checksum="") if is_adapter else None
        return cls(
            version=version,
            rank=0,
            shards=(),
            transport="",
            codec="",
            source=None,
            checksum="",
            chain_hash="",
            adapter=base,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightProbe:
    """A fixed text and its log-probs under one version, as the trainer computes them."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """[tokens - 1] log-prob of each token after the first, at temperature 1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightRef:
    """One version of the policy's weights: a manifest without the tensors' content."""

    tensors_within: ClassVar = ("parts",)
    version: int
    parts: Sequence[WeightPart] = field(default=())
    """Parts of all trainer ranks, in rank order; empty for simulated weights."""
    probe: WeightProbe | None = None
    """Probe that checks the weights of a server after an update. If None, they are not checked."""
    _pickled_parts: bytes | None = field(default=None, init=False, repr=False)
    """Pickle of `parts`, made once: the same reference is sent to every engine, with a part of each trainer rank."""

    def __reduce__(self) -> "tuple[Callable[..., WeightRef], tuple[object, ...]]":
        if self._pickled_parts is None:
            object.__setattr__(self, "_pickled_parts", _pickle_without_content(self.parts))
        if not self._pickled_parts:  # the message's own pickler treats arrays and tensors
            return _make_ref, (self.version, self.parts, self.probe)
        return _make_ref, (self.version, self._pickled_parts, self.probe)

    @property
    def is_stored(self) -> bool:
        """True if the content is in a store, so that fetch() may be called before a reader opens the version."""
        return bool(self._list_stored())

    def fetch(self) -> None:
        """Brings the content from the store to this process, which keeps it as long as this object exists."""
        for table in self._list_stored():
            len(table)

    def _list_stored(self) -> "list[Mapping[str, object]]":
        """Returns the tables of the version that are in a store."""
        tables = [getattr(part.source, "tensors", None) for part in self.parts]
        return [table for table in tables if _is_stored(table)]

    @property
    def checksum(self) -> str:
        """Returns the hashes of all parts, joined."""
        return " ".join(part.checksum for part in self.parts)

    @property
    def adapters(self) -> tuple[AdapterBase, ...]:
        """Returns each trainer rank's adapter base, if an adapter is sent alone; () for whole weights."""
        return tuple(part.adapter for part in self.parts if part.adapter is not None)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes written for this version."""
        return sum(part.num_bytes for part in self.parts)


def _make_ref(version: int, parts: "bytes | Sequence[WeightPart]", probe: WeightProbe | None) -> WeightRef:
    found = pickle.loads(parts) if isinstance(parts, bytes) else parts
    return WeightRef(version=version, parts=found, probe=probe)


def _is_stored(value: object) -> "TypeGuard[Mapping[str, object]]":
    """Returns whether a value is a table in a store."""
    return isinstance(value, Mapping) and not isinstance(value, dict)


class _ContentError(Exception):
    """An address of a part contains arrays or tensors."""


class _AddressPickler(pickle.Pickler):
    """Pickles addresses. Raises _ContentError at an array, a tensor, or a table in a store."""

    def reducer_override(self, value: object) -> Any:
        """Refuses arrays, tensors, and tables in a store, which must note each message that names them."""
        if _is_stored(value) or type(value).__module__.partition(".")[0] in ("numpy", "torch"):
            raise _ContentError
        return NotImplemented


def _pickle_without_content(parts: Sequence[WeightPart]) -> bytes:
    """Returns the pickle of parts; empty if one of them contains arrays, tensors or tables in a store."""
    file = io.BytesIO()
    try:
        _AddressPickler(file, protocol=5).dump(parts)
    except _ContentError:
        return b""
    return file.getvalue()
