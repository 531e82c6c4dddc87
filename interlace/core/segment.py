"""Segments of a sample. L = tokens of the segment."""

from dataclasses import dataclass, field

import numpy as np

from interlace.core.aliases import BoolArray, FloatArray, Inputs, IntArray
from interlace.core.runs import Runs

EMPTY_INT: IntArray = np.zeros(0, np.int32)
EMPTY_FLOAT: FloatArray = np.zeros(0, np.float32)
NO_VERSIONS: Runs[int] = Runs(())

RESPONSE = "response"
"""Kind of a segment that the policy generated."""
FINAL = "final"
"""Kind of a segment with one token, which follows a context that was not answered because of a limit."""
PROMPT = -1
"""Parent of a segment that continues the prompt."""


# Without slots: C code pickles a dictionary, but Python code pickles the slots of a dataclass.
@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Tokens that were added to a sample together: a response, a turn, the answer of a tool."""

    parent: int | None = PROMPT
    """Index of the earlier segment that this one continues, or PROMPT. None if its context has no prompt."""
    token_ids: IntArray
    """[L] tokens, including the stop token."""
    sampled: BoolArray | None = None
    """[L] True on tokens that the policy sampled, which are trained; False on inserted text. None if all are True."""
    logprobs: FloatArray = field(default_factory=lambda: EMPTY_FLOAT)
    """[L] behaviour log-probs, in nats; 0 on tokens that were not sampled. Empty if unknown."""
    versions: Runs[int] = NO_VERSIONS
    """[L] version that produced each token. A token that was not sampled has the version of the turn before it."""
    inputs: Inputs | None = None
    """Arrays whose embeddings replace the placeholder tokens among `token_ids`, in order."""
    query_ids: IntArray | None = None
    """[L] placeholder tokens from which `token_ids` were decoded in parallel; None if decoding was autoregressive. No
    segment continues a segment with placeholders."""
    shown_ids: IntArray | None = None
    """[L] tokens that an expert would have answered instead of `token_ids`; None if no expert was asked."""
    reward: float | None = None
    """Reward of this turn by the episode, a part of the sample's reward. None if the episode gave none."""
    kind: str = RESPONSE
    """Kind of the segment, for transcripts: `response`, `tool`, `user`, ..."""
