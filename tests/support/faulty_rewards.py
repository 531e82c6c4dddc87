"""Reward functions that each misbehave in one way for one of three responses; worker processes import them."""

import asyncio
import contextlib
import ctypes
import math
import os
import threading
import time
import zlib
from collections.abc import Mapping

from interlace.core.types import JSON

Metadata = Mapping[str, JSON]


def takes_another_order(response: str, metadata: Metadata, answer: str, prompt: str) -> float:
    """Fails if the arguments are passed by position."""
    if not isinstance(metadata, Mapping) or not isinstance(response, str) or not prompt or prompt == answer:
        raise TypeError(f"the arguments are exchanged: {prompt!r} is the prompt")
    return 0.0 if is_bad(response) else 1.0


def is_bad(response: str) -> bool:
    return zlib.crc32(response.encode()) % 3 == 0


def raises(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    return 1 / 0 if is_bad(response) else 1.0


def raises_ctrl_c(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    if is_bad(response):
        raise KeyboardInterrupt
    return 1.0


def recurses(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    return recurses(prompt, response, answer, metadata) if is_bad(response) else 1.0


def gives_nan(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    return math.nan if is_bad(response) else 1.0


def gives_too_much(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    return 1e300 if is_bad(response) else 1.0


def gives_none(prompt: str, response: str, answer: str, metadata: Metadata) -> float | None:
    return None if is_bad(response) else 1.0


def gives_a_list(prompt: str, response: str, answer: str, metadata: Metadata) -> object:
    return [1.0] if is_bad(response) else 1.0


def exits(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    if is_bad(response):
        os._exit(7)
    return 1.0


def crashes(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    if is_bad(response):
        ctypes.string_at(0)
    return 1.0


def asks(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    return float(input()) if is_bad(response) else 1.0


def hangs(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    while is_bad(response):
        pass
    return 1.0


async def never_returns(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    if is_bad(response):
        await asyncio.Event().wait()
    return 1.0


async def blocks(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    if is_bad(response):
        time.sleep(600)
    return 1.0


async def swallows(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    while is_bad(response):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
    return 1.0


def gives_text(prompt: str, response: str, answer: str, metadata: Metadata) -> object:
    return "5" if is_bad(response) else 1.0


def prints(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    print("x" * 200_000)
    return 1.0


def names_parts_at_length(prompt: str, response: str, answer: str, metadata: Metadata) -> dict[str, float]:
    return {"x" * 100_000: 1.0, "<script>alert(1)</script>": 0.5}


def leaves_a_thread(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return 1.0


def gives_infinity(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    return math.inf if is_bad(response) else 1.0


def gives_a_word(prompt: str, response: str, answer: str, metadata: Metadata) -> object:
    return "good" if is_bad(response) else 1.0


def names_fifty_parts(prompt: str, response: str, answer: str, metadata: Metadata) -> dict[str, float]:
    return {f"part {zlib.crc32(f'{response}{number}'.encode())}": 1.0 for number in range(50)}


def always_raises(prompt: str, response: str, answer: str, metadata: Metadata) -> float:
    return 1 / 0
