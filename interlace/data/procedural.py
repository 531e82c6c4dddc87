"""Rows from reasoning-gym, which makes item i of a dataset from Random(seed + i)."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from interlace.core.errors import UserError, nearest
from interlace.core.random import keyed_random
from interlace.data.config import MixturePart, ReasoningGymSource
from interlace.data.rows import Row, Split

WINDOW = 2**21
"""Consecutive seeds that one split of one `seed` owns. Splits never share an item, and all seeds stay below 2**32,
which some datasets need."""


def procedural_rows(source: ReasoningGymSource, split: Split) -> Iterator[Row]:
    """Draws a split's rows one after another, repeated questions included, until its window of seeds ends.

    Raises UserError at the first row if the dataset or one of its parameters is unknown or refused.
    """
    base = (2 * source.seed + (split == "heldout")) * WINDOW
    parts = source.mixture or (MixturePart(weight=1.0),)
    datasets = [_create_dataset(source, {**source.parameters, **part.parameters}, base) for part in parts]
    weights = [part.weight for part in parts]
    for index in range(WINDOW):
        [dataset] = keyed_random("mixture", base + index).choices(datasets, weights) if len(parts) > 1 else datasets
        entry = dataset[index]
        yield Row(
            uid=f"{source.name}/{base + index}",
            origin=f"{source.name} {split} item {index}",
            prompt=entry["question"],
            # A few datasets have no single answer; their scorers read the metadata alone.
            answer=entry["answer"] or "",
            metadata=entry["metadata"],
        )


def _create_dataset(source: ReasoningGymSource, parameters: Mapping[str, object], seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if source.name not in DATASETS:
        raise UserError(f"unknown reasoning_gym dataset {source.name!r}.{nearest(source.name, DATASETS)}")
    settings = {field.name for field in dataclasses.fields(DATASETS[source.name][1])} - {"seed", "size"}
    for name in parameters:
        if name not in settings:
            raise UserError(f"unknown parameter {name!r} of dataset {source.name!r}.{nearest(name, settings)}")
    try:
        return reasoning_gym.create_dataset(source.name, seed=seed, size=WINDOW, **parameters)
    except (AssertionError, TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in parameters.items())
        raise UserError(f"reasoning_gym dataset {source.name!r} refuses its parameters ({given}): {error}.") from error
