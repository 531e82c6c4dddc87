"""Lending: devices that training shares with rollout generate, until a batch is nearly there."""

from collections.abc import Iterable, Sequence

from interlace.rollouts.driver import EngineDriver


class Lending:
    """Engines on devices that training shares: they are called back before training has to ask for its devices.

    Only where other engines are left to go on with what runs there.
    """

    def __init__(self, drivers: Sequence[EngineDriver], trained_on: Iterable[int], until: float | None) -> None:
        """trained_on: devices of the trained roles. until: share of a batch that ends the loan; None: never early."""
        shared = set(trained_on)
        self._lent = [each for each in drivers if shared.intersection(each.group.device_indices)]
        self._own = [each for each in drivers if each not in self._lent]
        self._until = until
        self._called: list[EngineDriver] = []
        """Engines that were called back from a loan."""

    def look(self, share: float) -> None:
        """Ends the loan where so large a share of the open batch is complete."""
        if self._until is None or share < self._until or self._called:
            return
        others = [each for each in self._own if not each.is_away]
        if others:
            self._called = [each for each in self._lent if not each.is_away]
            for each in self._called:
                each.leave(others)

    def renew(self) -> None:
        """Lends the devices again, after a step."""
        called, self._called = self._called, []
        for each in called:
            each.join()
