"""Duration of consecutive decode steps of the same sequences."""

import math
from dataclasses import dataclass, field, replace


@dataclass(slots=True, eq=False)
class Stretch:
    """Consecutive decode steps of the same sequences: k steps take prefill_s + k first_s + k^2 reading_s."""

    steps: int
    num_running: int
    prefill_s: float
    first_s: float
    reading_s: float
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = self.prefill_s + self.steps * self.first_s + self.reading_s * self.steps**2

    def cut(self, steps: int) -> "Stretch":
        """Returns the stretch with at most `steps` steps."""
        return replace(self, steps=steps) if steps < self.steps else self

    def steps_in(self, seconds: float) -> int:
        """Returns the number of steps that begin within `seconds`."""
        seconds -= self.prefill_s
        if seconds <= 0:
            return 0
        first, reading = self.first_s, self.reading_s
        steps = (math.sqrt(first**2 + 4 * reading * seconds) - first) / (2 * reading) if reading else seconds / first
        return math.ceil(steps - 1e-9)
