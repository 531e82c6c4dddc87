"""Loans of the training devices to rollout, until a batch is nearly complete."""

from collections.abc import Iterable, Sequence

from interlace.rollouts.driver import EngineDriver, Standing


class Lending:
    """Ends the use of training devices by engines before training requests the devices.

    Consumes: the complete share of the open batch (`look`), and the ends of steps (`renew`).
    Produces: engines on training devices that leave the pool, and join it again after the step.
    Waits for: nothing. Without other engines that can continue the sequences, loans do not end early.
    Released by: the end of the step, which renews the loans.
    """

    def __init__(self, drivers: Sequence[EngineDriver], trained_on: Iterable[int], until: float | None) -> None:
        """trained_on: devices of the trained roles. until: share of a batch that ends loans, or None for never."""
        shared = set(trained_on)
        self._lent = [each for each in drivers if shared.intersection(each.group.device_indices)]
        self._own = [each for each in drivers if each not in self._lent]
        self.until = until
        """Share of a batch that ends loans; None for never."""
        self._called: list[EngineDriver] = []
        """Engines whose loan ended."""

    def look(self, share: float) -> None:
        """Ends the loans if the complete share of the open batch is at least `until`."""
        if self.until is None or share < self.until or self._called:
            return
        others = [each for each in self._own if not each.is_away]
        if others:
            self._called = [each for each in self._lent if not each.is_away]
            for each in self._called:
                each.leave(others)

    def renew(self) -> None:
        called, self._called = self._called, []
        for each in called:
            if each.standing is not Standing.LOST:
                each.join()
