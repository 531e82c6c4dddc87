"""Short notes about events of a run, for the user."""

from collections.abc import Callable


class Notes:
    """Passes notes to their receivers. A note without a receiver is dropped."""

    def __init__(self) -> None:
        self._receivers: list[Callable[[str], None]] = []

    def follow(self, receiver: Callable[[str], None]) -> None:
        """Adds a receiver. It is called with the text of each later note."""
        self._receivers.append(receiver)

    def add(self, text: str) -> None:
        """Passes a note to all receivers."""
        for receiver in self._receivers:
            receiver(text)
