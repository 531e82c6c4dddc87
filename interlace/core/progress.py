"""Intermediate results of generation: drafts of streamed responses, and the progress of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.types import Response


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draft:
    """Incomplete response of a request that streams."""

    request_id: str
    token_ids: Sequence[int]
    """All tokens so far, including tokens that were generated before a resumption."""
    text: str
    """The tokens, decoded like the text of a Response. It may end with an incomplete character."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Progress:
    """Results of a rollout worker since the last query."""

    responses: tuple[Response, ...] = ()
    drafts: tuple[Draft, ...] = ()
    """Drafts of requests that stream and have new tokens since the last query."""
    num_running: int = 0
    num_waiting: int = 0
    num_new_tokens: int = 0
    kv_use: float = 0.0
    """Largest share of the KV cache that running sequences used, 0 to 1. 0 if the engine does not report it."""
    num_preemptions: int = 0
    """Sequences that were preempted: they released their KV cache and must recompute it."""
    lost: str = ""
    """Reason why the engine cannot serve any more; empty while it can."""
