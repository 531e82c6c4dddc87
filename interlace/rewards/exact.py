"""Right if the response is the answer, except for white space around both."""

from collections.abc import Mapping

from interlace.core.types import JSON


def score(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> bool:
    """Returns the verdict."""
    del prompt, metadata
    return response.strip() == answer.strip()
