"""How fast an engine decodes at which batch, as far as it has shown: what too small a batch is, is measured."""

from interlace.runtime.timeline import Served

UNDERFILLED_SHARE = 0.5
"""Of the best tokens/s: a batch that decodes at less does not use the device."""
MIN_CALLS = 3
"""Of a batch size, before its tokens/s may be the best."""


class DecodeCurve:
    """Tokens/s of one engine against its batch, over all calls so far. Batches are counted by powers of two.

    Where decoding is limited by reading the weights, a step takes as long for one sequence as for many, and tokens/s
    grow with the batch until computing becomes the limit (the roofline). The share above cuts that curve.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._calls: dict[int, int] = {}
        self._rates: dict[int, float] = {}
        """Tokens/s, of those with calls enough."""

    def observe(self, call: Served) -> None:
        """Learns from a call that mostly decoded; one that mostly read prompts says little of the batch."""
        seconds = call.span.end_s - call.span.start_s
        if seconds <= 0 or call.num_new_tokens <= call.num_prompt_tokens + call.num_repeated_tokens:
            return
        size = _size(call.batch)
        self._tokens[size] = self._tokens.get(size, 0) + call.num_new_tokens
        self._seconds[size] = self._seconds.get(size, 0.0) + seconds
        self._calls[size] = self._calls.get(size, 0) + 1
        if self._calls[size] >= MIN_CALLS:
            self._rates[size] = self._tokens[size] / self._seconds[size]

    def tokens_per_s(self, batch: int) -> float | None:
        """At batches of about this size; None where there was none."""
        size = _size(batch)
        return self._tokens[size] / self._seconds[size] if size in self._calls else None

    def is_underfilled(self, batch: int) -> bool:
        """Whether a batch decodes at less than the share of the best; no where nothing is known of it."""
        rate = self.tokens_per_s(batch)
        return rate is not None and rate < UNDERFILLED_SHARE * max(self._rates.values(), default=0.0)


def _size(batch: int) -> int:
    return batch.bit_length()
