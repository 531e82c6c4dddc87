"""interlace: reinforcement-learning post-training where the flow is written once and the way it runs is data."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlace.jobs.library import TrainedRun, train

__all__ = ["TrainedRun", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Loads what trains, and torch with it, when it is first asked for."""
    if name in __all__:
        return getattr(import_module("interlace.jobs.library"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
