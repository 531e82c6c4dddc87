"""Speculative decoding without a draft model: drafts are tokens that followed the same n-gram before.

The search covers the response and its siblings. The sampling noise is keyed by position, so verification is equality:
the token sampled after an accepted draft is the token of plain decoding. Samples and log-probs do not change.
"""

from collections import OrderedDict

import numpy as np

from interlace.engines.rollout.kv_store import Int64Array
from interlace.engines.rollout.sequence import SequenceTable

LONGEST_MATCH, SHORTEST_MATCH = 8, 2
_TOKENS_A_PROMPT, _PROMPTS = 4096, 1024
_SEPARATOR = -1
STEPS_WITHOUT = 4
"""Passes without another attempt after no draft was found."""
TRIAL, REST = 16, 256
"""Passes with drafts after which their acceptance is evaluated, and tokens without drafts after a failure."""
MIN_ACCEPTED = 0.25
"""Minimum accepted draft tokens per pass; below it speculation does not pay."""


class NgramDrafter:
    """Index of the last responses to each prompt, which proposes the tokens after the longest matching suffix."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, Int64Array] = OrderedDict()

    def observe(self, uid: str, token_ids: Int64Array) -> None:
        """Adds a finished response to prompt `uid`."""
        parts = (token_ids, np.asarray([_SEPARATOR]), self._responses.pop(uid, np.zeros(0, np.int64)))
        self._responses[uid] = np.concatenate(parts)[:_TOKENS_A_PROMPT]
        if len(self._responses) > _PROMPTS:
            self._responses.popitem(last=False)

    def propose(self, uid: str, token_ids: Int64Array, most: int) -> Int64Array:
        """Guesses up to `most` tokens after `token_ids` (prompt and response so far); none without a match."""
        if most < 1 or len(token_ids) < SHORTEST_MATCH + 1:
            return np.zeros(0, np.int64)
        text = token_ids
        earlier = self._responses.get(uid)
        if earlier is not None:
            text = np.concatenate([earlier, np.asarray([_SEPARATOR]), token_ids])
        # Ends of earlier occurrences of the suffix; the suffix is extended while any occurrence remains.
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


class Speculator:
    """Draft tokens for decoding rows while few rows run and drafts are accepted, with their evaluation.

    It counts tokens instead of time, so that runs are reproducible.
    """

    def __init__(self, table: SequenceTable, *, most: int, below: int) -> None:
        """most: tokens of a draft; 0 turns speculation off. below: most running sequences with speculation."""
        self._table, self._most, self._below = table, most, below
        self._drafter = NgramDrafter()
        self._num_passes = self._accepted = self._rest = 0
        self.has_guessed = False
        """True if the table contains drafts."""

    def guess(self, rows: Int64Array) -> int | None:
        """Writes drafts after the known tokens of the running rows.

        Returns the number of passes until the next call; None if any number may follow.
        """
        table = self._table
        if self.has_guessed:
            table.num_drafts[~table.at_once] = 0
        self.has_guessed = False
        if not self._most or len(rows) > self._below or self._rest > 0:
            return None
        for row in rows.tolist():
            known = int(table.num_tokens[row])
            if known - table.num_computed[row] != 1 or table.at_once[row]:
                continue
            most = min(self._most, int(table.limit[row]) - known - 1)
            draft = self._drafter.propose(table.occupant(row).request.uid, table.token_ids[row, :known], most)
            table.token_ids[row, known : known + len(draft)] = draft
            table.num_drafts[row] = len(draft)
            self.has_guessed |= len(draft) > 0
        return 1 if self.has_guessed else STEPS_WITHOUT

    def judge(self, accepted: int) -> None:
        """Records the number of draft tokens that one pass accepted."""
        self._num_passes += 1
        self._accepted += accepted
        if self._num_passes == TRIAL:
            self._rest = 0 if self._accepted >= MIN_ACCEPTED * TRIAL else REST
            self._num_passes = self._accepted = 0

    def wait(self, tokens: int) -> None:
        """Counts tokens that were sampled without drafts."""
        self._rest -= tokens

    def observe(self, row: int) -> None:
        """Adds the tokens of a row whose sequence has ended, as a source of later drafts."""
        if self._most:
            table = self._table
            start = max(int(table.num_prompt[row]) - LONGEST_MATCH, 0)  # Drafts of the first tokens need a suffix too.
            known = table.token_ids[row, start : table.num_tokens[row]]
            self._drafter.observe(table.occupant(row).request.uid, known.copy())
