"""Rounded to bfloat16 on the way; the reader brings the values back into the type that is served."""

from interlace.weights.codecs.raw import Raw
from interlace.weights.config import WeightsConfig

_ROUNDED = ("float32", "float64")


class Cast(Raw):
    """Half the bytes of float32, and eight bits of its mantissa."""

    name = "cast"

    def wire_dtype(self, dtype: str) -> str:
        """Returns bfloat16 for wider floats; whole numbers stay."""
        return "bfloat16" if dtype in _ROUNDED else dtype


def encoder(config: WeightsConfig) -> Cast:  # noqa: ARG001 - it has no settings
    """Makes the writer's end."""
    return Cast()


def decoder() -> Cast:
    """Makes the reader's end."""
    return Cast()
