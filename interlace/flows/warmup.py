"""Supervised fine-tuning on prompt/answer pairs: what a policy needs before reinforcement has anything to reinforce."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from interlace.core.errors import InterlaceError
from interlace.core.types import Sample
from interlace.stages.role_groups import TrainedGroup

FAILURES = 8
"""In a row, at the end of a warm-up, that make it useless."""


class ExampleSource(Protocol):
    """Source of examples."""

    def batch(self, step: int) -> Sequence[Sample]:
        """Returns the examples of a step, as samples with their answer as the response."""
        ...


async def supervised_warmup(
    trainer: TrainedGroup,
    examples: ExampleSource,
    *,
    num_steps: int,
    folder: Path,
    on_step: Callable[[int], None],
) -> None:
    """Trains for `num_steps` optimizer steps, writes the model to `folder`. on_step: called with how many are done."""
    async with trainer.hold("warm-up"):
        for step in range(num_steps):
            await trainer.accumulate(examples.batch(step))
            await trainer.optimizer_step()
            on_step(step + 1)
        failed = (await trainer.step_metrics()).get("actor/failed_updates_in_a_row", 0.0)
        if failed >= min(num_steps, FAILURES):
            raise InterlaceError(
                f"the last {failed:.0f} of {num_steps} updates of the warm-up were dropped: a loss or a gradient was "
                "not finite, or the learning rate would leave nothing of the weights. Lower warmup.optimizer.lr."
            )
        await trainer.copy_checkpoint()
    await trainer.write_checkpoint(folder)
