"""A warm-up with a criterion ends when the habit is learned, or with an error."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from interlace.core.errors import InterlaceError
from interlace.core.types import FloatArray, Metrics, Sample
from interlace.engines.train import make_supervised_sample
from interlace.flows.warmup import HabitCheck, run_supervised_warmup


class Trainer:
    """Learns one more of the checked samples every ten steps."""

    def __init__(self) -> None:
        self.steps, self.written = 0, False

    @asynccontextmanager
    async def hold(self, what: str) -> AsyncIterator[None]:
        yield

    async def accumulate(self, samples: Sequence[Sample]) -> None: ...

    async def optimizer_step(self) -> None:
        self.steps += 1

    async def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        known = self.steps // 10
        unlikely = np.float32(-3.0)
        return [np.array([unlikely, 0 if place < known else unlikely], np.float32) for place in range(len(samples))]

    async def step_metrics(self) -> Metrics:
        return {}

    async def copy_checkpoint(self) -> None: ...

    async def write_checkpoint(self, folder: Path) -> None:
        self.written = True


class Examples:
    def batch(self, step: int) -> Sequence[Sample]:
        return []


def warm_up(max_steps: int, tmp_path: Path) -> tuple[Trainer, float | None]:
    trainer = Trainer()
    samples = [make_supervised_sample([1], [2, 3]) for _ in range(10)]
    mask = np.array([False, True])
    check = HabitCheck(samples=samples, checked=[mask] * 10, accuracy=0.8, every=5, max_steps=max_steps)
    work = run_supervised_warmup(
        trainer,  # type: ignore[arg-type]
        Examples(),
        num_steps=20,
        folder=tmp_path,
        on_step=lambda done: None,
        check=check,
    )
    return trainer, asyncio.run(work)


def test_it_ends_at_the_first_measurement_that_reaches_the_accuracy(tmp_path: Path) -> None:
    trainer, accuracy = warm_up(200, tmp_path)
    assert (trainer.steps, accuracy, trainer.written) == (80, 0.8, True)


def test_it_ends_with_an_error_at_the_limit(tmp_path: Path) -> None:
    with pytest.raises(InterlaceError, match=r"accuracy of 0.70 .* in 75 steps, not warmup.until.accuracy=0.8"):
        warm_up(75, tmp_path)
