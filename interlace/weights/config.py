"""Settings of the weight transfer, a recipe's `weights` section. Imports no torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.errors import nearest
from interlace.core.plugins import builtin_names

BY_PLACE = "auto"
"""Value of `transport` that chooses a transport by the placement of trainer and engines."""


class WeightsConfig(Config):
    """Transfer of new weights from the actor to the engines. No setting changes which version an engine serves."""

    transport: str = BY_PLACE
    """auto: `alias` within one process, `shared_memory` on one machine, `object_store` between machines of a Ray
    cluster. Other values: the name of a module in weights/transports, or your class as package.module:Name."""
    codec: str = "raw"
    """raw: the served bits. cast: half the bytes, rounded to bfloat16. int8: a quarter of the bytes, rounded by rows.
    Neither rounds tensors that transformers keeps in float32, such as the bias of a router. delta: positions and new
    values of the changes since the previous version, without loss. Other values: your class as package.module:Name."""
    adapter: Literal["merged", "alone"] = "merged"
    """Content of a version if an adapter is trained (actor.lora). merged: all weights, with the adapter merged.
    alone: only the adapter's factors; each engine adds them to the base that it loaded."""
    full_every: int = Field(default=16, ge=1)
    """For codec `delta`: one version in this many is sent whole; a late engine reads the deltas since then."""
    densest: float = Field(default=0.5, gt=0, le=1)
    """For codec `delta`: a version is sent whole if the delta takes more than this share of its bytes."""
    folder: str | None = None
    """For transport `folder`: parent folder of the versions, each a Hugging Face folder, on a disk that all machines
    share."""
    patience_s: float = Field(default=120.0, gt=0)
    """For gloo and nccl: seconds without a byte after which a transfer fails. Engines then keep the old weights."""

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
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
