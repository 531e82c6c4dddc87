"""Weights as an engine would read them from a trainer's process."""

from collections.abc import Mapping

from torch import Tensor

from interlace.engines.train import TrainEngine
from interlace.weights.reader import WeightReader
from interlace.weights.ref import WeightRef
from interlace.weights.writer import WeightWriter


def published(engine: TrainEngine, *, copy: bool = True) -> Mapping[str, Tensor]:
    """Returns all weights by name. copy: whether they are protected from later updates."""
    ref = WeightRef(version=0, parts=(engine.write_weights(WeightWriter(), 0, copy=copy),))
    with WeightReader().open(ref) as read:
        return dict(read)
