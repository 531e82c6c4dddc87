"""Reward of examples/deploy/qwen7b.yaml."""

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def reward(response: str, answer: str) -> float:
    """Returns 1 if the last number of the response equals the number after `####` in the row's answer, else 0."""
    expected = _NUMBER.findall(answer.rpartition("####")[2])
    found = _NUMBER.findall(response)
    return float(bool(found and expected) and float(found[-1].replace(",", "")) == float(expected[-1].replace(",", "")))
