"""Messages of `channel.py` and how they are moved: plain functions that run in any peer's environment."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

BOUND = 64
"""Largest number of messages in a queue."""
WARM_UP_S = 5.0
"""Seconds before the first measurement, because a newly started Ray is still busy."""
Put, Get = Callable[[Any], Any], Callable[[], Any]


def items(length: int, count: int) -> list[dict[str, Any]]:
    """Returns the message: token ids and log-probs of `count` samples."""
    draw = np.random.default_rng(0)
    return [
        {
            "token_ids": draw.integers(0, 32000, length, dtype=np.int32),
            "logprobs": draw.random(length, dtype=np.float32),
        }
        for _ in range(count)
    ]


def produce(put: Put, message: Any, count: int) -> float:
    """Sends messages. Returns the start time on the clock that all processes of a machine share."""
    start = time.monotonic()
    for _ in range(count):
        put(message)
    return start


def consume(get: Get, count: int) -> float:
    """Receives messages. Returns the end time."""
    for _ in range(count):
        touch(get())
    return time.monotonic()


def touch(message: Any) -> None:
    """Reads the last token of every item, whether the items are listed, stacked or nested."""
    rows = message if isinstance(message, list) else [message]
    for token_ids in (row["token_ids"] for row in rows):
        for item in token_ids if token_ids.ndim > 1 else [token_ids]:
            int(item[-1])


def ping(put: Put, get: Get, message: Any, count: int) -> list[float]:
    """Returns the seconds of each round trip."""
    trips = []
    for _ in range(count):
        start = time.monotonic()
        put(message)
        touch(get())
        trips.append(time.monotonic() - start)
    return trips


def pong(put: Put, get: Get, count: int) -> None:
    """Sends every message back."""
    for _ in range(count):
        put(get())
