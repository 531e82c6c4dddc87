"""Inbox of the deltas of running requests, between a client's event loop and the thread of the engine's caller."""

import threading
import time
from collections import deque
from collections.abc import Sequence

from interlace.core.types import Request
from interlace.engines.rollout.services.protocol import Delta


class DeltaInbox:
    """Collects the deltas of running requests until they are taken. Deltas of withdrawn requests are ignored.

    It also holds the loss of the server, because both wake the thread that waits.
    """

    def __init__(self) -> None:
        self.lost = ""
        """Reason why the server counts as lost; empty while it does not."""
        self._news = threading.Condition()
        self._is_interrupted = False
        self._deltas: deque[tuple[str, Delta]] = deque()
        self._running: dict[str, int] = {}
        """Running request -> number of its submission."""
        self._last_token_s = time.monotonic()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def quiet_s(self) -> float:
        """Seconds since the last delta or other sign of progress."""
        return time.monotonic() - self._last_token_s

    def begin(self, requests: Sequence[Request], number: int) -> None:
        """Accepts the deltas of requests. number: number of their submission."""
        self._running.update((request.id, number) for request in requests)
        self.note_progress()

    def note_progress(self) -> None:
        """Restarts the measurement of `quiet_s`."""
        self._last_token_s = time.monotonic()

    def is_running(self, name: str) -> bool:
        """Returns True if the server runs the request."""
        return name in self._running

    def accepts(self, name: str, number: int) -> bool:
        """Returns False for a delta of a submission that was withdrawn, or after the loss of the server."""
        return self._running.get(name) == number and not self.lost

    def add(self, name: str, delta: Delta) -> None:
        """Adds a delta of a running request, and wakes wait()."""
        self.note_progress()
        with self._news:
            if delta.finish_reason is not None or delta.refusal:
                del self._running[name]
            self._deltas.append((name, delta))
            self._news.notify_all()

    def forget(self, name: str) -> None:
        """Ignores all later deltas of a request."""
        self._running.pop(name, None)

    def take(self) -> list[tuple[str, Delta]]:
        with self._news:
            found = [*self._deltas]
            self._deltas.clear()
        return found

    def clear(self) -> None:
        with self._news:
            self._deltas.clear()
            self._running.clear()

    def wait(self) -> None:
        """Waits until a delta arrives, the server is lost, or interrupt() is called."""
        with self._news:
            self._news.wait_for(lambda: self._deltas or self._is_interrupted or self.lost)
            self._is_interrupted = False

    def wait_for_ends(self, names: Sequence[str], *, patience_s: float) -> None:
        """Waits until none of the requests runs, at most `patience_s` seconds, or until the server is lost."""
        with self._news:
            self._news.wait_for(
                lambda: self.lost or not any(name in self._running for name in names), timeout=patience_s
            )

    def interrupt(self) -> None:
        """Ends the current wait(), or the next one."""
        with self._news:
            self._is_interrupted = True
            self._news.notify_all()

    def lose(self, reason: str) -> None:
        """Records that the server counts as lost; the first reason is kept."""
        with self._news:
            self.lost = self.lost or reason
            self._news.notify_all()
