"""Drafts without a model: what followed the same few tokens before, in this response or in its siblings.

Sampling noise is keyed by position, so verification is equality: the token drawn from the model's distribution after
an accepted draft is the one that plain decoding would have drawn there. Samples and log-probs do not change at all.
"""

from collections import OrderedDict
from collections.abc import Collection

import numpy as np

from interlace.engines.rollout.kv_store import Int64Array
from interlace.engines.rollout.sequence import SequenceState, SequenceTable

LONGEST_MATCH, SHORTEST_MATCH = 8, 2
_TOKENS_A_PROMPT, _PROMPTS = 4096, 1024
_SEPARATOR = -1
STEPS_WITHOUT = 4
"""DecodeLoop in one go where there was nothing to guess, before the next try."""
TRIAL, REST = 16, 256
"""DecodeLoop with guesses after which they are judged, and tokens for which they are left off where they failed."""
MIN_ACCEPTED = 0.25
"""Guessed tokens a pass that came true. Below it even where a few rows cost what one costs, little is gained."""


class NgramDrafter:
    """Keeps the last responses to each prompt and proposes what followed the longest matching suffix."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, Int64Array] = OrderedDict()

    def observe(self, uid: str, token_ids: Int64Array) -> None:
        """Keeps a response to prompt `uid` that ended."""
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


class Speculator:
    """Guesses for the decoding rows while few run and guesses come true, and what became of them.

    It counts tokens, not time, so that a run goes as the one before it.
    """

    def __init__(self, table: SequenceTable, *, most: int, below: int) -> None:
        """most: tokens of a guess; 0 turns it off. below: running sequences up to which there are any."""
        self._table, self._most, self._below = table, most, below
        self._drafter = NgramDrafter()
        self._decode_loop = self._accepted = self._rest = 0
        self.has_guessed = False
        """Flag: the table holds guesses."""

    def guess(self, running: Collection[SequenceState]) -> int | None:
        """Writes guesses behind what is known of rows. Returns the passes that may follow at once; None: any number."""
        table = self._table
        if self.has_guessed:
            table.num_drafts[~table.at_once] = 0
        self.has_guessed = False
        if not self._most or len(running) > self._below or self._rest > 0:
            return None
        for sequence in running:
            row, known = sequence.row, int(table.num_tokens[sequence.row])
            if known - table.num_computed[row] != 1 or table.at_once[row]:
                continue
            most = min(self._most, int(table.limit[row]) - known - 1)
            draft = self._drafter.propose(sequence.request.uid, table.token_ids[row, :known], most)
            table.token_ids[row, known : known + len(draft)] = draft
            table.num_drafts[row] = len(draft)
            self.has_guessed |= len(draft) > 0
        return 1 if self.has_guessed else STEPS_WITHOUT

    def judge(self, accepted: int) -> None:
        """Records how many guessed tokens one pass accepted."""
        self._decode_loop += 1
        self._accepted += accepted
        if self._decode_loop == TRIAL:
            self._rest = 0 if self._accepted >= MIN_ACCEPTED * TRIAL else REST
            self._decode_loop = self._accepted = 0

    def wait(self, tokens: int) -> None:
        """Counts tokens that were drawn without guesses."""
        self._rest -= tokens

    def observe(self, sequence: SequenceState) -> None:
        """Keeps the tokens of a sequence that ends, from which later ones may guess. Its row still holds them."""
        if self._most:
            start = max(sequence.num_prompt - LONGEST_MATCH, 0)  # a guess of its first tokens needs a suffix too
            known = self._table.token_ids[sequence.row, start : self._table.num_tokens[sequence.row]]
            self._drafter.observe(sequence.request.uid, known.copy())
