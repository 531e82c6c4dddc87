"""A user's reward functions, good and bad; worker processes import them by name."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from interlace.core.types import JSON


def length(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> float:
    return float(len(response))


def is_from_answer(data_source: str, answer: str) -> bool:
    return data_source == answer


def size(response: str) -> float:
    """Takes no answer, so that rows need none."""
    return float(len(response))


class MuteError(Exception):
    """Exception without a readable message."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


def moody(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> float:
    """Misbehaves as the response requests."""
    while response == "hang":
        pass
    while response == "sleep":
        time.sleep(0.05)
    if response == "ctrl-c":
        raise KeyboardInterrupt
    if response == "exit":
        os._exit(3)
    if response == "half":
        raise ValueError("half \ud83d of a character")
    if response == "mute":
        raise MuteError
    if response == "quit":
        sys.exit(4)
    if response == "raise":
        raise KeyError("no such thing")
    return 1.0


def hopeless(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> float:
    raise KeyError("hopeless")


def endless(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> float:
    """Prints the PID of its process, and never ends."""
    print(os.getpid(), flush=True)
    while True:
        pass


def process(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> dict[str, float]:
    """Reports properties of its process."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"torch": float("torch" in sys.modules), "mebibytes": kilobytes / 1024, "pid": float(os.getpid())}


def stopped(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> float:
    """Sends SIGTERM to all processes of the run at the first sample, as a scheduler does."""
    first = Path(response)
    if not first.exists():
        first.touch()
        for process in (os.getppid(), os.getpid()):
            os.kill(process, signal.SIGTERM)
    return 1.0


waiting: list[str] = []
"""Responses that judged() has received, until there are four."""


async def judged(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> float:
    """Returns only after four concurrent calls, like a judge that scores batches."""
    if response == "raise":
        raise KeyError("no such thing")
    waiting.append(response)
    while len(waiting) % 4:
        await asyncio.sleep(0)
    return float(len(response))


def of_a_batch(completions: list[str], **columns: object) -> list[float]:
    """Has the signature of TRL's reward functions."""
    return [1.0 for _ in completions]


def ranked(completions: list[str]) -> list[float]:
    """Compares the responses of a batch."""
    order = sorted(completions, key=len)
    return [float(order.index(text)) for text in completions]


def hungry(response: str) -> float:
    """Allocates as many mebibytes as the response requests."""
    return float(len(bytearray(int(response) << 20)) > 0)


def stuck(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> float:
    """Hangs while the file `stuck` exists."""
    while Path("stuck").exists():
        pass
    return float(len(response) % 3)


async def stuck_judge(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> float:
    """Blocks if the file `stuck` exists."""
    if Path("stuck").exists():
        time.sleep(600)
    return float(len(response) % 3)


async def stubborn_judge(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> float:
    """Ignores cancellation while the file `stuck` exists."""
    while Path("stuck").exists():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1)
    return float(len(response) % 3)


async def moody_judge(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> float:
    """Misbehaves as the response requests."""
    if response == "block":
        time.sleep(600)
    if response == "block later":
        await asyncio.sleep(0.2)
        await asyncio.gather(moody_judge(prompt, "block", answer, metadata))
    if response == "slow":
        await asyncio.sleep(0.4)
    if response == "block deeper":
        await asyncio.gather(moody_judge(prompt, "block", answer, metadata))
    while response == "swallow":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
    if response == "ctrl-c":
        raise KeyboardInterrupt
    if response == "exit":
        os._exit(3)
    await asyncio.sleep(0.05)
    return float(os.getpid())
