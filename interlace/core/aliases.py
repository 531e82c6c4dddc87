"""Names of plain types: arrays, JSON values, metrics."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Inputs: TypeAlias = Mapping[str, NDArray[np.generic]]
"""Named arrays that accompany tokens, such as images or a robot's state: [N, ...] for N observations."""
JSON: TypeAlias = "None | bool | int | float | str | Sequence[JSON] | Mapping[str, JSON]"
Metrics = dict[str, float]
"""Values by metric name, as written to metrics.jsonl."""
