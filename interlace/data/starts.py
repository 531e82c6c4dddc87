"""Rows that are starts of a robot's episodes: an instruction, a task and the state that it begins in."""

from collections.abc import Iterator

from interlace.data.config import StartSource
from interlace.data.rows import Row, Split

HELDOUT_FROM = 900_000_000
"""First initial state that is kept for evaluation."""
IMAGINED = "imagined"
"""Column that is true where a row's episode is to be imagined."""


def start_rows(source: StartSource, split: Split) -> Iterator[Row]:
    """Lists a split's rows, task by task in turns."""
    first, size = (HELDOUT_FROM, source.heldout_size) if split == "heldout" else (0, source.train_size)
    first += source.seed * 1_000_000
    each = 1 + (source.imagined_per_start if split == "train" else 0)
    for number in range(size):
        index, place = divmod(number, len(source.instructions))
        task = source.tasks[place] if source.tasks else place
        yield Row(
            uid=f"start/{task}/{first + index}",
            origin=f"start {number} of {split}",
            prompt=source.instructions[place],
            answer="",
            metadata={"task": task, "init_state": first + index, **({IMAGINED: True} if index % each else {})},
        )
