"""Search for stop strings in the decoded tokens of a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from interlace.core.types import Request
    from interlace.engines.rollout.kv_store import Int64Array


def ends_with_text(
    response: Sequence[int] | Int64Array, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Returns whether the decoded end of a response contains one of some texts, at least one."""
    text = tokenizer.decode(np.asarray(response[-_count_searched(stops) :]).tolist())
    return any(stop in text for stop in stops)


def find_resumed_stop(
    request: Request, token_ids: Sequence[int], num_new: int, tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """Returns the number of tokens up to a stop string that began before the request was resumed, or None.

    A server gets the tokens from before a resumption as a part of the prompt, in which it searches no stop string.
    token_ids: all tokens of the response. num_new: number of the last ones, which were not searched yet.
    """
    before, stops = len(request.generated_ids), request.params.stop
    if not before or not stops:
        return None
    first, last = max(before, len(token_ids) - num_new) + 1, min(len(token_ids), before + _count_searched(stops))
    return next((end for end in range(first, last + 1) if ends_with_text(token_ids[:end], stops, tokenizer)), None)


def _count_searched(stops: Sequence[str]) -> int:
    """Returns the number of last tokens that are decoded to find a stop string at their end."""
    # A token can be a quarter of a character, and the first decoded one may be a fragment.
    return 4 * max(map(len, stops)) + 8
