"""Settings of publication, a recipe's `weights` section. Imports no torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.errors import nearest
from interlace.core.plugins import builtin_names

BY_PLACE = "auto"
"""In place of a transport's name: chosen by where the two ends are."""


class WeightsConfig(Config):
    """How new weights travel from the actor to the engines. None of it changes which version an engine serves."""

    transport: str = BY_PLACE
    """auto: `alias` within one process, `shared_memory` on one machine, `object_store` between machines of a Ray
    cluster. Or one of weights/transports by name, or your own as package.module:Name."""
    codec: str = "raw"
    """raw: the bits that are served. cast: half the bytes, rounded to bfloat16. int8: a quarter, rounded by rows.
    delta: positions and new values of what changed since the version before, without any loss. Or your own as
    package.module:Name."""
    adapter: Literal["merged", "alone"] = "merged"
    """Content of a version where an adapter is trained (actor.lora). merged: all weights with the adapter added in.
    alone: its factors alone; each engine adds them to the base that it loaded."""
    full_every: int = Field(default=16, ge=1)
    """delta: versions from one that is sent whole to the next; a late engine reads what lies between."""
    densest: float = Field(default=0.5, gt=0, le=1)
    """delta: a version that would take more than this share of the whole one's bytes is sent whole."""
    folder: str | None = None
    """folder: where versions are written, one subfolder each, in Hugging Face format; a disk that all machines see."""
    patience_s: float = Field(default=120.0, gt=0)
    """gloo, nccl: seconds without a byte before a transfer is given up. The old weights go on serving then."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        from interlace.weights import codecs, transports

        for key, given, package in (("transport", self.transport, transports), ("codec", self.codec, codecs)):
            names = [*builtin_names(package), *([BY_PLACE] if key == "transport" else [])]
            if ":" not in given and given not in names:
                raise ValueError(
                    f"unknown weights.{key} {given!r}.{nearest(given, names)} Your own: package.module:Name"
                )
        if self.transport == "folder" and not self.folder:
            raise ValueError("weights.transport = 'folder' needs weights.folder, a path that both sides see")
        if self.codec == "delta" and self.transport in ("alias", "shared_memory", "cuda_ipc"):
            raise ValueError(
                f"weights.codec = 'delta' saves bytes on a wire, and {self.transport} has none: engines serve from the "
                "trainer's copy. Leave the codec out, or take another transport"
            )
        return self
