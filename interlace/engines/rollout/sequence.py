"""Sequences of an engine: one object per sequence, and arrays with one row per running sequence."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interlace.core.guide import Guide
from interlace.core.random import stable_hash
from interlace.core.types import Request
from interlace.engines.rollout.filters import reshapes_logits, truncates
from interlace.engines.rollout.kv_store import Int64Array


def marks_of(token_ids: Int64Array, size: int) -> list[int]:
    """Returns checksums of the first `size` tokens, of the first 2 `size`, and so on. Users compare the tokens too."""
    content = token_ids.astype(np.int64, copy=False).tobytes()
    marks, mark, step = [], 0, 8 * size
    for start in range(0, len(content) - step + 1, step):
        mark = zlib.crc32(content[start : start + step], mark)
        marks.append(mark)
    return marks


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request in progress. While it has a row, the table has its current tokens."""

    request: Request
    arrival: int
    """Order of submission: the youngest is preempted first, the oldest admitted first."""
    limit: int
    """Length at which it ends, in tokens, prompt included."""
    row: int = -1
    """Row in the table; -1 while it waits."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens of the prompt and the response so far."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the generated tokens."""
    versions: list[int] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    """Log-probs of the unmodified logits; kept if requested."""
    version: int | None = None
    """Older version under which the sequence began and will end; None for the newest version."""
    num_cached: int = -1
    """Tokens of the prompt that were cached at its first run; -1 before it."""
    prompt: bytes = field(init=False)
    """Tokens of the request's prompt, as a key."""
    _marks: tuple[int, list[int]] = field(default=(0, []))
    """Number of tokens for which the marks were computed, and the marks."""

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.request.prompt_ids, np.int64).tobytes()

    @property
    def has_begun(self) -> bool:
        """Returns True if some of it was computed, or sampled by another engine."""
        return self.row >= 0 or bool(self.versions)

    @property
    def shares_prefixes(self) -> bool:
        """Returns True if others may share its keys: they depend only on its tokens and the newest weights."""
        return self.request.inputs is None and self.version is None

    @property
    def num_prompt(self) -> int:
        """Counts the tokens before the first sampled one: the prompt's, and the query for it if there is one."""
        return len(self.request.prompt_ids) + bool(self.request.query_ids)

    def marks(self, size: int) -> list[int]:
        """Returns marks_of() its tokens, computed once for each length.

        size: tokens between two marks, the same in each call, because the result is kept.
        """
        if self._marks[0] != len(self.token_ids):
            self._marks = len(self.token_ids), marks_of(np.asarray(self.token_ids, np.int64), size)
        return self._marks[1]


class DrawnTokens(NamedTuple):
    """Sampled tokens of one sequence, [L] each."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]


class SequenceTable:
    """Arrays over rows, so that a decode step takes a few vector operations for any number of sequences."""

    def __init__(self, rows: int, seed: int) -> None:
        self._seed = seed
        self.token_ids = np.zeros((rows, 64), np.int64)
        """[rows, columns] prompt and generated tokens; beyond num_tokens, drafts."""
        self.logprobs = np.zeros((rows, 64), np.float32)
        """[rows, columns] by the position of the token; undefined in the prompt's columns."""
        self.versions = np.zeros((rows, 64), np.int32)
        self.raw_logprobs = np.zeros((rows, 64), np.float32)
        self.num_tokens = np.zeros(rows, np.int64)
        self.num_computed = np.zeros(rows, np.int64)
        """Tokens whose keys and values are in the store."""
        self.num_drafts = np.zeros(rows, np.int64)
        """Tokens after the known ones that run with the last of them: guesses, or the queries after the first."""
        self.at_once = np.zeros(rows, np.bool_)
        """Rows whose tokens are all sampled in one pass, from queries."""
        self.num_prompt = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.noise_key = np.zeros(rows, np.uint64)
        self.temperature = np.zeros(rows, np.float32)
        self.stop_ids = np.full((rows, 1), -1, np.int64)
        self.special = np.zeros(rows, np.bool_)
        """Rows with reshaped or truncated logits, or with raw log-probs."""
        self.stops_on_text = np.zeros(rows, np.bool_)
        self.num_with_inputs = 0
        """Number of rows whose sequences have input arrays."""
        self.num_guided = 0
        """Number of rows whose sequences have a guide."""
        self.num_unusual = 0
        """Number of rows that are special or have stop strings."""
        self._sequences: list[SequenceState | None] = [None] * rows
        self._free = list(range(rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, sequence: SequenceState) -> None:
        """Gives a sequence a row, without computed tokens."""
        row = self._free.pop()
        sequence.row, self._sequences[row] = row, sequence
        request, params = sequence.request, sequence.request.params
        self._grow_table(sequence.limit, len(params.stop_token_ids))
        prompt, total = sequence.num_prompt, len(sequence.token_ids)
        self.token_ids[row, :total] = sequence.token_ids
        self.logprobs[row, prompt:total] = sequence.logprobs
        self.versions[row, prompt:total] = sequence.versions
        self.num_tokens[row], self.num_prompt[row], self.limit[row] = total, prompt, sequence.limit
        self.num_computed[row] = 0
        queries = request.query_ids[1:]
        self.token_ids[row, total : total + len(queries)] = queries
        self.num_drafts[row], self.at_once[row] = len(queries), bool(request.query_ids)
        self.noise_key[row] = stable_hash(self._seed, request.noise_key)
        self.temperature[row] = params.temperature
        self.special[row] = reshapes_logits(params) or truncates(params) or params.raw_logprobs
        if params.raw_logprobs:
            self.raw_logprobs[row, prompt:total] = sequence.raw_logprobs
        self.stops_on_text[row] = bool(params.stop)
        self.num_unusual += self._is_unusual(row)
        self.num_with_inputs += request.inputs is not None
        self.num_guided += request.guide is not None
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(params.stop_token_ids)] = params.stop_token_ids

    def leave(self, sequence: SequenceState) -> None:
        """Copies the row back into the sequence and frees the row."""
        row, prompt = sequence.row, sequence.num_prompt
        total = int(self.num_tokens[row])
        sequence.token_ids = self.token_ids[row, :total].tolist()
        sequence.logprobs = self.logprobs[row, prompt:total].tolist()
        sequence.versions = self.versions[row, prompt:total].tolist()
        if sequence.request.params.raw_logprobs:
            sequence.raw_logprobs = self.raw_logprobs[row, prompt:total].tolist()
        self.num_unusual -= self._is_unusual(row)
        self.num_with_inputs -= sequence.request.inputs is not None
        self.num_guided -= sequence.request.guide is not None
        sequence.row, self._sequences[row] = -1, None
        self.num_tokens[row] = self.num_computed[row] = self.num_drafts[row] = 0
        self._free.append(row)

    def list_drawn(self, sequence: SequenceState) -> list[int]:
        """Returns the tokens after a sequence's prompt."""
        if sequence.row < 0:
            return sequence.token_ids[sequence.num_prompt :]
        drawn: list[int] = self.token_ids[sequence.row, sequence.num_prompt : self.num_tokens[sequence.row]].tolist()
        return drawn

    def copy_row(self, sequence: SequenceState) -> DrawnTokens:
        """Returns a copy of a sequence's sampled tokens, from its row or, without one, from the sequence."""
        row, prompt = sequence.row, sequence.num_prompt
        if row < 0:
            return DrawnTokens(sequence.token_ids[prompt:], sequence.logprobs, sequence.versions)
        drawn = slice(prompt, int(self.num_tokens[row]))
        arrays = (self.token_ids, self.logprobs, self.versions)
        return DrawnTokens(*(array[row, drawn].tolist() for array in arrays))

    def occupant(self, row: int) -> SequenceState:
        sequence = self._sequences[row]
        if sequence is None:
            raise KeyError(f"row {row} is free")
        return sequence

    def list_guides(self, rows: Int64Array) -> list[Guide | None]:
        """Returns the guide of each sequence of `rows`, whose tokens are adjacent. Empty if no row has a guide."""
        if not self.num_guided:
            return []
        chosen = rows[np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])].tolist()
        guides = [self.occupant(row).request.guide for row in chosen]
        return guides if any(guide is not None for guide in guides) else []

    def append(self, rows: Int64Array, token_ids: Int64Array, logprobs: NDArray[np.float32], version: int) -> None:
        at = self.num_tokens[rows]
        self.token_ids[rows, at] = token_ids
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.num_tokens[rows] = at + 1

    def append_all(self, row: int, token_ids: Int64Array, logprobs: NDArray[np.float32], version: int) -> None:
        """Adds the tokens [L] of a row whose tokens are sampled at once."""
        new = slice(int(self.num_tokens[row]), int(self.num_tokens[row]) + len(token_ids))
        self.token_ids[row, new], self.logprobs[row, new], self.versions[row, new] = token_ids, logprobs, version
        self.num_tokens[row], self.num_drafts[row] = new.stop, 0

    def _is_unusual(self, row: int) -> bool:
        return bool(self.special[row] or self.stops_on_text[row])

    def _grow_table(self, columns: int, stops: int) -> None:
        have = self.token_ids.shape[1]
        if columns > have:
            more = ((0, 0), (0, max(columns, 2 * have) - have))
            self.token_ids = np.pad(self.token_ids, more)
            self.logprobs = np.pad(self.logprobs, more)
            self.versions = np.pad(self.versions, more)
            self.raw_logprobs = np.pad(self.raw_logprobs, more)
        if stops > self.stop_ids.shape[1]:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, stops - self.stop_ids.shape[1])), constant_values=-1)
