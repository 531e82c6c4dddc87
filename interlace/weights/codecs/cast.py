"""Codec that rounds floats to bfloat16; the reader converts them back to the served dtype."""

from interlace.weights.codecs.raw import Raw
from interlace.weights.config import WeightsConfig
from interlace.weights.plan import Shard

_ROUNDED = ("float32", "float64")


class Cast(Raw):
    """Needs half the bytes of float32, with eight bits of its mantissa."""

    name = "cast"

    def wire_dtype(self, shard: Shard) -> str:
        """Returns bfloat16 for wider floats; exact shards and other dtypes stay unchanged."""
        return "bfloat16" if shard.dtype in _ROUNDED and not shard.is_exact else shard.dtype


def encoder(config: WeightsConfig) -> Cast:  # noqa: ARG001 - it has no settings
    """Makes the writer side."""
    return Cast()


decoder = Cast
