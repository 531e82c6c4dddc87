"""Rewards of the runs of drift.py: the length of a response, and a tool that slows down."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

LIMIT = 96
"""Largest number of tokens of a response."""
SLOW_FILE = "INTERLACE_DRIFT_SLOW"
"""Environment variable with the path of a file. While the file exists, the tool is slow."""
TOOL_S, SLOWDOWN = 0.004, 4.0
"""Seconds of the tool for a response, and the factor by which it slows down."""


def longer(prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
    """Returns the length of a response as a share of the limit; each character is a token."""
    del prompt, answer, metadata
    return min(1.0, len(response) / LIMIT)


def score_with_tool(prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
    """Returns 1 after the time of the tool, which waits and takes no core."""
    del prompt, response, answer, metadata
    time.sleep(TOOL_S * (SLOWDOWN if Path(os.environ[SLOW_FILE]).exists() else 1.0))
    return 1.0
