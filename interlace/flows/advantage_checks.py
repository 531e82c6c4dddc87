"""Checks of the arrays that a user's algorithm returns, before training reads them."""

from collections.abc import Sequence

import numpy as np

from interlace.algorithms.base import Advantages, Needs
from interlace.core.errors import UserError
from interlace.core.types import Sample, SampleGroup


def check_advantages(result: object, group: SampleGroup, needs: Needs) -> None:
    """Raises UserError if the type or the shape of the advantages is not the one that training reads."""
    if not isinstance(result, Advantages):
        raise UserError(f"the algorithm's advantages() returned a {type(result).__name__}, not Advantages.")
    check_shapes("advantages", "advantages", result.advantages, group.samples)
    if result.returns is not None:
        check_shapes("advantages", "returns", result.returns, group.samples)
    elif needs.critic:
        raise UserError(
            "the algorithm's advantages() returned no returns, which its critic is trained towards. Return "
            "Advantages(advantages=..., returns=...), or need no critic."
        )


def check_shapes(method: str, what: str, arrays: object, samples: Sequence[Sample]) -> None:
    """Raises UserError unless `arrays` has one array per sample, with one number per token."""
    lengths = [sample.num_tokens for sample in samples]
    if (shapes := _shapes(arrays)) != [(length,) for length in lengths]:
        raise UserError(
            f"the algorithm's {method}() returned {what} of shapes {shapes} for {len(lengths)} samples whose responses "
            f"have {lengths} tokens. Return one array per sample, with one number per token."
        )


def _shapes(arrays: object) -> object:
    if not isinstance(arrays, Sequence | np.ndarray):
        return type(arrays).__name__
    return [getattr(array, "shape", type(array).__name__) for array in arrays]
