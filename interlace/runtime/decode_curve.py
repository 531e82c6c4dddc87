"""How fast an engine decodes at which batch, as far as it has shown: what too small a batch is, is measured."""

from dataclasses import dataclass

from interlace.runtime.timeline import EngineCall

UNDERFILLED_SHARE = 0.5
"""Share of the best tokens/s: a batch that decodes at less does not use the device."""
MIN_CALLS = 3
"""Calls of a batch size that are measured before its tokens/s may be the best."""


class DecodeCurve:
    """Tokens/s of one engine against its batch, over all calls so far. Batches are counted by powers of two.

    Where decoding is limited by reading the weights, a step takes as long for one sequence as for many, and tokens/s
    grow with the batch until computing becomes the limit (the roofline). The share above cuts that curve.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._too_small: set[int] | None = None
        """Sizes that are underfilled; None where calls came since it was found."""

    def observe(self, call: EngineCall) -> None:
        """Learns from a call that mostly decoded; one that mostly read prompts says little of the batch."""
        seconds = call.span.end_s - call.span.start_s
        if seconds <= 0 or call.num_new_tokens <= call.num_prompt_tokens + call.num_repeated_tokens:
            return
        size = call.batch.bit_length()
        if size not in self._seen:
            self._seen[size] = _Seen()
        seen = self._seen[size]
        seen.num_tokens += call.num_new_tokens
        seen.seconds += seconds
        seen.num_calls += 1
        seen.weighted_batch += call.batch * call.num_new_tokens
        self._too_small = None

    def tokens_per_s(self, batch: int) -> float | None:
        """Returns tokens/s at batches of about this size; None where there was none."""
        seen = self._seen.get(batch.bit_length())
        return seen.tokens_per_s if seen else None

    def steps(self) -> list[tuple[float, float]]:
        """Returns (sequences, seconds of a decode step) of each size seen often enough, by rising number of sequences.

        A step of more sequences takes no less time: what noise says otherwise is smoothed away.
        """
        found: list[tuple[float, float]] = []
        for _, seen in sorted(self._seen.items()):
            if seen.num_calls >= MIN_CALLS:
                batch = seen.weighted_batch / seen.num_tokens
                found.append((batch, max(batch * seen.seconds / seen.num_tokens, found[-1][1] if found else 0.0)))
        return found

    def is_underfilled(self, batch: int) -> bool:
        """Says whether a batch decodes at less than the share of the best; False where nothing is known of its size."""
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
    weighted_batch: float = 0.0
    """Sum over calls of their batch times their tokens."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds
