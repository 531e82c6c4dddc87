"""Shared parts of the kinds whose engines are serving engines of other projects."""

import tempfile
from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from interlace.engines.rollout.config import SpanningConfig
from interlace.engines.rollout.kinds import EngineKind, Feature

if TYPE_CHECKING:
    from interlace.models.loading import LoadedModel


class ServedKind(EngineKind, ABC):
    """Kind of engine that reads its model from a folder and spans as many devices as its settings say."""

    config: SpanningConfig
    lacks: ClassVar[Mapping[Feature, str]] = {
        "raw_logprobs": "it gives log-probs of one kind, those sampled from",
        "kv_offload": "its KV cache is given up when its device changes hands",
        "kv_use": "it does not say how full its KV cache is",
    }

    def num_devices(self, pool: str) -> int:  # noqa: ARG002 - of any
        return self.config.tensor_parallel_size


@contextmanager
def saved_model(loaded: "LoadedModel") -> Iterator[str]:
    """Saves a model for a while, so that an engine finds it under the names that a trainer's updates have."""
    with tempfile.TemporaryDirectory(prefix="interlace-served-") as folder:
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        yield folder
