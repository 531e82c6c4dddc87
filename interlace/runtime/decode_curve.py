"""Measured decode speed of an engine by batch size: the costs of a step, and the batch sizes that are too small."""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from interlace.core.decode_costs import DecodeCosts
from interlace.runtime.timeline import EngineCall

UNDERFILLED_SHARE = 0.5
"""Share of the best tokens/s. A batch that decodes more slowly underfills the device."""
LEAST_USE = 0.02
"""Smallest share of the KV cache from which its size can be estimated."""
MIN_CALLS = 3
"""Number of measured calls that a batch size needs before its tokens/s may count as the best."""


class DecodeCurve:
    """Tokens/s of one engine against its batch size, over all calls so far. Batch sizes are grouped by powers of two.

    If reading the weights limits decoding, a step takes as long for one sequence as for many. Tokens/s then grow with
    the batch until computing becomes the limit (the roofline). UNDERFILLED_SHARE sets the threshold on that curve.
    """

    def __init__(self) -> None:
        self._seen: defaultdict[int, _Seen] = defaultdict(_Seen)
        self._too_small: set[int] | None = None
        """Underfilled batch sizes. None if calls were observed since they were computed."""
        self._products, self._targets = np.zeros((3, 3)), np.zeros(3)
        """Normal equations for the seconds of a step by (1, batch, held tokens)."""
        self._kv_tokens = 0.0
        """Capacity of the KV cache in tokens; 0 until a call has held some."""

    def observe(self, call: EngineCall) -> None:
        """Adds a call that mostly decoded. Calls that mostly read prompts contain little information on the batch."""
        seconds = call.span.end_s - call.span.start_s
        if seconds <= 0 or call.num_new_tokens <= call.num_prompt_tokens + call.num_repeated_tokens:
            return
        seen = self._seen[call.batch.bit_length()]
        seen.num_tokens += call.num_new_tokens
        seen.seconds += seconds
        seen.num_calls += 1
        seen.weighted_batch += call.batch * call.num_new_tokens
        steps = call.num_new_tokens / call.batch
        seen.num_steps += steps
        seen.held_steps += call.num_held_tokens * steps
        row = np.array((1.0, call.batch, call.num_held_tokens))
        self._products += np.outer(row, row)
        self._targets += row * (seconds / steps)
        if call.kv_use > LEAST_USE:
            # kv_use is the call's maximum and num_held_tokens its mean, so the estimate errs on the low side.
            self._kv_tokens = max(self._kv_tokens, call.num_held_tokens / call.kv_use)
        self._too_small = None

    def tokens_per_s(self, batch: int) -> float | None:
        """Returns tokens/s at batches of about this size. Returns None if there were none."""
        seen = self._seen.get(batch.bit_length())
        return seen.tokens_per_s if seen else None

    def costs(self) -> DecodeCosts | None:
        """Returns the measured costs of a decode step. Returns None if fewer than two sizes have enough measurements.

        A least-squares fit over all calls separates the cost of the context from the cost of the batch. A step of more
        sequences takes no less time, so noise to the contrary is smoothed out.
        """
        seen = [each for _, each in sorted(self._seen.items()) if each.num_calls >= MIN_CALLS]
        if len(seen) < 2:
            return None
        context_token_s = self._context_token_s()
        found: list[tuple[float, float]] = []
        for each in seen:
            batch, steps = each.weighted_batch / each.num_tokens, each.num_steps
            step_s = (each.seconds - context_token_s * each.held_steps) / steps
            found.append((batch, max(step_s, found[-1][1] if found else 0.0)))
        return DecodeCosts(steps=found, context_token_s=context_token_s, kv_tokens=self._kv_tokens or math.inf)

    def _context_token_s(self) -> float:
        """Returns the seconds that a cached token adds to a step, at most the smallest mean time of a call per held
        token.
        """
        solved, *_ = np.linalg.lstsq(self._products, self._targets, rcond=None)
        most = min((each.seconds / each.held_steps for each in self._seen.values() if each.held_steps), default=0.0)
        return float(min(max(solved[2], 0.0), most))

    def is_underfilled(self, batch: int) -> bool:
        """Returns whether a batch decodes at less than UNDERFILLED_SHARE of the best.

        Returns False for an unmeasured size.
        """
        if self._too_small is None:
            best = max([seen.tokens_per_s for seen in self._seen.values() if seen.num_calls >= MIN_CALLS], default=0.0)
            self._too_small = {
                size for size, seen in self._seen.items() if seen.tokens_per_s < UNDERFILLED_SHARE * best
            }
        return batch.bit_length() in self._too_small


@dataclass(slots=True, eq=False)
class _Seen:
    """Calls of about one batch size."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_calls: int = 0
    num_steps: float = 0.0
    held_steps: float = 0.0
    """Sum over calls of held tokens times steps."""
    weighted_batch: float = 0.0
    """Sum over calls of batch size times new tokens."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds
