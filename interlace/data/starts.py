"""Rows that are starts of a robot's episodes: an instruction, a task and the state that it begins in."""

from collections.abc import Iterator

from interlace.data.config import StartSource
from interlace.data.formatting import Row, Split

HELDOUT_FROM = 900_000_000
"""First initial state that is kept for evaluation."""
IMAGINED = "imagined"
"""Column that is true for rows with imagined episodes."""


def start_rows(source: StartSource, split: Split) -> Iterator[Row]:
    """Lists a split's rows, task by task in turns; of a task with a larger share, several in its turn."""
    first, size = (HELDOUT_FROM, source.heldout_size) if split == "heldout" else (0, source.train_size)
    first += source.seed * 1_000_000
    each = 1 + (source.imagined_per_start if split == "train" else 0)
    shares = source.shares if split == "train" and source.shares else (1,) * len(source.instructions)
    tasks = source.tasks or tuple(range(len(source.instructions)))
    # Instructions of one task begin in the same states.
    texts = [f"/{earlier}" if (earlier := tasks[:place].count(task)) else "" for place, task in enumerate(tasks)]
    turns = [(place, turn) for place, share in enumerate(shares) for turn in range(share)]
    for number in range(size):
        round_, (place, turn) = number // len(turns), turns[number % len(turns)]
        index = round_ * shares[place] + turn
        yield Row(
            uid=f"start/{tasks[place]}/{first + index}{texts[place]}",
            origin=f"start {number} of {split}",
            prompt=source.instructions[place],
            answer="",
            metadata={"task": tasks[place], "init_state": first + index, **({IMAGINED: True} if index % each else {})},
        )
