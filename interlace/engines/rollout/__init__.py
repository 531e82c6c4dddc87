"""Rollout engines: token-in, token-out, with exact behaviour log-probs and a version on every token."""

from typing import TYPE_CHECKING

from interlace.core.types import SamplingParams
from interlace.engines.rollout.config import NativeConfig

if TYPE_CHECKING:
    from interlace.engines.rollout.engine import NativeEngine

__all__ = ["NativeConfig", "NativeEngine", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Imports the engine, and torch with it, on first access."""
    if name == "NativeEngine":
        from interlace.engines.rollout.engine import NativeEngine

        return NativeEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
