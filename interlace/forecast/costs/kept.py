"""Key-value cache that a simulated engine keeps for samples while their tools run."""

from collections.abc import Sequence

from interlace.core.kv_eviction import ReturnTimes, first_to_go
from interlace.core.types import Request, SampleKey


class KeptContexts:
    """Contexts of ended turns. They give way to running sequences in the same order as in a real engine."""

    def __init__(self) -> None:
        self._kept: dict[SampleKey, tuple[float, int]] = {}
        """Sample -> (time of the start, in seconds; number of tokens)."""
        self._returns = ReturnTimes()
        self.num_tokens = 0
        """Tokens of all kept contexts."""

    def keep(self, request: Request, num_tokens: int, now_s: float) -> None:
        """Keeps the context of a turn that ended, if its sample may have another turn."""
        if request.may_continue and num_tokens > 0:
            self.release([request.owner])
            self._kept[request.owner] = now_s, num_tokens
            self.num_tokens += num_tokens

    def take(self, request: Request, context: int, now_s: float) -> int:
        """Releases the context that was kept for the sample of a turn. Returns the tokens that are reused."""
        since_s, num_tokens = self._kept.get(request.owner, (0.0, 0))
        if num_tokens:
            self._returns.observe(now_s - since_s)
            self.release([request.owner])
        return max(0, min(num_tokens, context - 1))

    def release(self, owners: Sequence[SampleKey]) -> None:
        """Drops the contexts of these samples."""
        for owner in owners:
            _, num_tokens = self._kept.pop(owner, (0.0, 0))
            self.num_tokens -= num_tokens

    def fit(self, room: int, now_s: float) -> None:
        """Drops contexts, the cheapest first, until the rest fits into `room` tokens."""
        while self.num_tokens > max(0, room):
            owners = [*self._kept]
            waits = [(now_s - since_s, num_tokens) for since_s, num_tokens in self._kept.values()]
            self.release([owners[first_to_go(waits, patience_s=self._returns.patience_s)]])

    def clear(self) -> None:
        """Drops all contexts."""
        self._kept.clear()
        self.num_tokens = 0
