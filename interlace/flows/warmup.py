"""Supervised fine-tuning on prompt/answer pairs before reinforcement, so that a new policy earns some rewards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from interlace.core.errors import InterlaceError
from interlace.core.types import BoolArray, Sample
from interlace.rollouts.role_groups import ActorGroup

FAILURES = 8
"""Number of failed updates in a row at the end of a warm-up for which it raises an error."""
LIKELIEST = float(np.log(0.5))
"""Log-prob above which a token is certainly the most likely one of the model."""


class ExampleSource(Protocol):
    """Source of the demonstrations that a warm-up trains on."""

    def batch(self, step: int) -> Sequence[Sample]:
        """Returns the examples of a step as samples, each with its answer as the response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HabitCheck:
    """Check of the demonstrated habit, which ends a warm-up."""

    samples: Sequence[Sample]
    """Held-out demonstrations of the habit."""
    checked: Sequence[BoolArray]
    """For each sample [L], True on the tokens that the prompt determines."""
    accuracy: float
    """Share of correct samples at which the warm-up ends."""
    every: int
    """Steps between two checks."""
    max_steps: int

    def is_due(self, done: int, first: int) -> bool:
        """Returns whether a check follows `done` steps: `first` steps, then every `every` steps, and the last step."""
        return done >= first and ((done - first) % self.every == 0 or done == self.max_steps)


async def run_supervised_warmup(
    trainer: ActorGroup,
    examples: ExampleSource,
    *,
    num_steps: int,
    folder: Path,
    on_step: Callable[[int], None],
    check: HabitCheck | None = None,
) -> float | None:
    """Trains on the examples and writes the model to `folder`.

    num_steps: optimizer steps. With `check`, the steps before the first check; the check then ends the warm-up.
    on_step: called with the number of steps done. Returns the measured accuracy, or None without a check. Raises
    InterlaceError if the updates fail, or if the accuracy is not reached within the check's limit.
    """
    reached: float | None = None
    async with trainer.hold("warm-up"):
        for done in range(1, (check.max_steps if check else num_steps) + 1):
            await trainer.accumulate(examples.batch(done - 1))
            await trainer.optimizer_step()
            on_step(done)
            if check and check.is_due(done, num_steps):
                reached = await measure_habit(trainer, check)
            if check and reached is not None and reached >= check.accuracy:
                break
        await _check_updates(trainer, num_steps)
        if check and reached is not None and reached < check.accuracy:
            raise InterlaceError(
                f"the warm-up reached an accuracy of {reached:.2f} of the demonstrated habit in {check.max_steps} "
                f"steps, not warmup.until.accuracy={check.accuracy}. Raise warmup.until.max_steps, change "
                "warmup.optimizer or the share of the habit in warmup.demonstrations, or set warmup.until=null."
            )
        await trainer.copy_checkpoint()
    await trainer.write_checkpoint(folder)
    return reached


async def measure_habit(trainer: ActorGroup, check: HabitCheck) -> float:
    """Returns the share of samples in which each checked token is the most likely one of the model."""
    logprobs = await trainer.logprobs(check.samples)
    right = [bool((found[mask] > LIKELIEST).all()) for found, mask in zip(logprobs, check.checked, strict=True)]
    return sum(right) / len(right)


async def _check_updates(trainer: ActorGroup, num_steps: int) -> None:
    failed = (await trainer.step_metrics()).get("actor/failed_updates_in_a_row", 0.0)
    if failed >= min(num_steps, FAILURES):
        raise InterlaceError(
            f"the last {failed:.0f} updates of the warm-up were dropped: a loss or a gradient was not finite, or the "
            "learning rate would leave nothing of the weights. Lower warmup.optimizer.lr."
        )
