"""Right if the scorer of the prompt's reasoning-gym dataset gives full marks.

Several of its scorers give partial marks to answers that merely contain the right one; those count as wrong.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from interlace.core.errors import UserError
from interlace.core.types import JSON

PRELOAD = ("reasoning_gym",)


def score(prompt: str, response: str, metadata: Mapping[str, JSON], answer: str = "") -> bool:
    """Returns the verdict. Raises UserError for a prompt that is not from reasoning-gym."""
    dataset = metadata.get("source_dataset")
    if not isinstance(dataset, str):
        raise UserError("reward reasoning_gym scores prompts of a reasoning_gym dataset only; this one is from a file")
    return _find_scorer(dataset)(response, {"question": prompt, "answer": answer or None, "metadata": metadata}) == 1.0


@cache
def _find_scorer(dataset: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    found: Callable[[str, Mapping[str, Any]], float] = get_score_answer_fn(dataset)
    return found
