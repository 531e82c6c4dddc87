"""Settings in which the runs of a page differ."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.callables import drop_random_number
from interlace.core.flat_settings import format_settings
from interlace.observe.report.header import read_settings

ABSENT = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingDifference:
    """A setting that is not equal in all runs."""

    name: str
    """Dotted name."""
    values: Sequence[str]
    """The value in each run; ABSENT if a run lacks the setting."""


def find_differences(configs: Sequence[str]) -> list[SettingDifference]:
    """Compares the config.yaml of several runs, by name; empty for a single run."""
    # Names of a program's functions have a random number.
    found = [
        {name: drop_random_number(value) for name, value in format_settings(read_settings(config)).items()}
        for config in configs
    ]
    names = sorted({name for settings in found for name in settings})
    rows = [SettingDifference(name=name, values=[settings.get(name, ABSENT) for settings in found]) for name in names]
    return [row for row in rows if len(set(row.values)) > 1]
