"""Drafts without a model: what followed the same few tokens before, in this response or in its siblings.

Sampling noise is keyed by position, so verification is equality: the token drawn from the model's distribution after
an accepted draft is the one that plain decoding would have drawn there. Samples and log-probs do not change at all.
"""

from collections import OrderedDict

import numpy as np

from interlace.engines.rollout.kv_store import Int64Array

LONGEST_MATCH, SHORTEST_MATCH = 8, 2
_TOKENS_A_PROMPT, _PROMPTS = 4096, 1024
_SEPARATOR = -1


class NgramDrafter:
    """Keeps the last responses to each prompt and proposes what followed the longest matching suffix."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, Int64Array] = OrderedDict()

    def observe(self, uid: str, token_ids: Int64Array) -> None:
        """A response to prompt `uid` ended."""
        parts = (token_ids, np.asarray([_SEPARATOR]), self._responses.pop(uid, np.zeros(0, np.int64)))
        self._responses[uid] = np.concatenate(parts)[:_TOKENS_A_PROMPT]
        if len(self._responses) > _PROMPTS:
            self._responses.popitem(last=False)

    def propose(self, uid: str, token_ids: Int64Array, most: int) -> Int64Array:
        """Up to `most` tokens that may follow `token_ids` (prompt and response so far); none without a match."""
        if most < 1 or len(token_ids) < SHORTEST_MATCH + 1:
            return np.zeros(0, np.int64)
        text = token_ids
        earlier = self._responses.get(uid)
        if earlier is not None:
            text = np.concatenate([earlier, np.asarray([_SEPARATOR]), token_ids])
        # Where an earlier occurrence of the suffix ends; the suffix is made longer while any is left.
        ends, matched = np.arange(SHORTEST_MATCH, len(text)), 0
        for length in range(1, min(LONGEST_MATCH, len(token_ids)) + 1):
            longer = ends[ends >= length]
            longer = longer[text[longer - length] == token_ids[-length]]
            if not len(longer):
                break
            ends, matched = longer, length
        if matched < SHORTEST_MATCH:
            return np.zeros(0, np.int64)
        draft = text[ends[-1] : ends[-1] + most]
        cut = np.flatnonzero(draft == _SEPARATOR)
        return draft[: cut[0]] if len(cut) else draft
