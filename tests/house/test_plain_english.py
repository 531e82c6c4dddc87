"""Docstrings, comments and documents are in plain English, as counted by plain_english.py."""

from functools import cache
from pathlib import Path

import pytest

from tests.house.plain_english import (
    FILE_LIMITS,
    LIMITS,
    MIN_WORDS,
    ROOT,
    RULES,
    Measure,
    files_of,
    measure_file,
    measure_part,
)

EXAMPLES = {
    "write if or when instead of where": ("Raises where the lengths differ.", "The folder in which it is stored."),
    "name the thing instead of a clause with what": ("Returns what it costs.", "Returns the cost."),
    "write any X instead of whatever, whoever": ("Whatever the length is.", "For any length."),
    "write after instead of behind": ("The text behind it.", "The text after it."),
    "write next to or in addition to instead of beside": ("Runs beside training.", "Runs during training."),
    "write continue instead of go on": ("The sequence goes on.", "The sequence continues."),
    "write separate or its instead of of its own": ("A process of its own.", "A separate process."),
    "objects do not say or tell": ("The flag tells the kind.", "The flag selects the kind."),
    "write exists instead of is there": ("If the file is there.", "If the file exists."),
    "repeat the noun instead of that of": ("The limit is that of the pool.", "The limit is the pool's limit."),
}


@cache
def measures(part: str) -> dict[Path, Measure]:
    return {path: measure_file(path) for path in files_of(part)}


@pytest.mark.parametrize("part", LIMITS)
def test_a_part_is_within_its_limit(part: str) -> None:
    found = measure_part(list(measures(part).values()))
    assert found.index <= LIMITS[part], (
        f"{found.index:.1f} per 1,000: run python tests/house/plain_english.py --list ''"
    )


@pytest.mark.parametrize("part", FILE_LIMITS)
def test_each_file_is_within_its_limit(part: str) -> None:
    high = {
        str(path.relative_to(ROOT)): round(one.index, 1)
        for path, one in measures(part).items()
        if one.words >= MIN_WORDS and one.index > FILE_LIMITS[part]
    }
    assert not high, f"above {FILE_LIMITS[part]} hits per 1,000 words: {high}"


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_finds_its_construction_and_passes_the_plain_sentence(rule: str) -> None:
    unclear, plain = EXAMPLES[rule]
    assert RULES[rule].search(unclear)
    assert not any(one.search(plain) for one in RULES.values())
