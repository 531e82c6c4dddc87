"""The words that pass through the controller in place of weights: a version, and its parts' places. No torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from interlace.weights.config import WeightsConfig
from interlace.weights.plan import Shard

FACTORS = ("lora_A", "lora_B")
"""Names of an adapter's two factors, between the name of the layer and `weight`, as in peft's files."""
UpdateMode: TypeAlias = Literal["keep", "recompute", "own"]
"""Treatment of running sequences when weights change. They go on under the new ones, on the KV cache that is there
(keep) or on one that is computed again; own: each ends under the weights that it began with, which are held beside the
new ones until then. `own` is for adapters that travel alone."""
_SHARED = Path("/dev/shm")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Whereabouts of one end of a transport."""

    memory: str
    """Names the memory that processes share by files; empty on a system without such a folder."""
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
    """How a run's weights travel, as the controller decided."""

    transport: str
    config: WeightsConfig
    reason: str = ""
    """Why it is this transport, for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBase:
    """Weights that the factors of an adapter are added to: an engine has loaded them, and they stay as they are."""

    scale: float
    """Factor of the product of both factors."""
    is_turned: bool
    """True where weights are [inputs, outputs], and the product is turned round."""
    shards: Sequence[Shard]
    """Blocks of the layers' own weights that the trainer rank holds."""
    checksum: str
    """Hash of these blocks: an engine with another base refuses the adapter."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightPart:
    """One trainer rank's share of a version: what it holds, and where that can be fetched."""

    tensors_within: ClassVar = ("source", "behind")
    version: int
    rank: int
    shards: Sequence[Shard]
    """Blocks that the rank holds, in the type that is served."""
    transport: str
    codec: str
    """How the content is written: a `delta` publication that is sent whole says `raw`."""
    source: object
    """Address of the content, in the transport's own words."""
    checksum: str
    """Hash of the content."""
    frozen: bool = True
    """False where the content is the trainer's own memory, which its next update changes."""
    num_bytes: int = 0
    """Bytes of the content."""
    base: int | None = None
    """Version that a delta is applied to."""
    is_base: bool = False
    """True for a part sent whole to which deltas may follow."""
    behind: "tuple[WeightPart, ...]" = ()
    """For a delta: the last part that is whole and those after it, so that a late reader finds all it needs."""
    seconds: float = 0.0
    """Seconds that writing it took."""
    adapter: AdapterBase | None = None
    """For an adapter that travels alone; None for whole weights."""

    @classmethod
    def simulated(cls, version: int, *, is_adapter: bool = False) -> "WeightPart":
        """Returns a part without content, of a trainer that only takes time."""
        base = AdapterBase(scale=1.0, is_turned=False, shards=(), checksum="") if is_adapter else None
        return cls(version=version, rank=0, shards=(), transport="", codec="", source=None, checksum="", adapter=base)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightProbe:
    """A fixed text and its log-probs under one version, as the trainer computes them."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """[tokens - 1] of each token after the first, at temperature 1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightRef:
    """One version of the policy's weights: its manifest, never its tensors' content."""

    tensors_within: ClassVar = ("parts",)
    version: int
    parts: Sequence[WeightPart] = field(default=())
    """Parts of all trainer ranks, in their order; empty where weights are simulated."""
    probe: WeightProbe | None = None
    """By which a server's weights are checked after an update; None: they are not checked."""

    @property
    def checksum(self) -> str:
        """Returns the hashes of all parts, joined."""
        return " ".join(part.checksum for part in self.parts)

    @property
    def adapters(self) -> tuple[AdapterBase, ...]:
        """Returns what each trainer rank says of the base, where an adapter travels alone; () for whole weights."""
        return tuple(part.adapter for part in self.parts if part.adapter is not None)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that were written for it."""
        return sum(part.num_bytes for part in self.parts)
