"""The steps between which a reader of a page chooses."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from interlace.core.ranges import format_ranges
from interlace.observe.report import steps
from interlace.observe.report.device_time import DeviceTimeline
from interlace.observe.report.header import Entry, read_entry
from interlace.observe.report.page import render_report
from interlace.observe.report.steps import StoredSteps, parse_choice
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import ROOT, RunFolder
from tests.unit.observe.report.test_page import NUM_STEPS, make_run


def entry_of(folder: RunFolder) -> Entry:
    return read_entry(RunData.read(folder), folder, DeviceTimeline.read(folder.timeline))


def figures_of(html: str) -> set[tuple[str, str, str]]:
    return set(re.findall(r'<template data-section="(\w+)" data-run="(\d)" data-step="(\d+)">', html))


def test_a_report_contains_all_steps_of_a_small_run_in_addition_to_the_shown_one(tmp_path: Path) -> None:
    html = render_report([entry_of(make_run(tmp_path, "run"))], 2)
    others = [str(step) for step in range(1, NUM_STEPS + 1) if step != 2]
    assert figures_of(html) == {(section, "0", step) for section in ("timeline", "lanes") for step in others}
    assert f'data-steps="1-{NUM_STEPS}" data-chosen="2"' in html and "interlace watch run" not in html


def test_a_report_stays_within_its_limit_and_prefers_the_steps_with_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry_of(make_run(tmp_path, name)) for name in ("one", "two")]
    sizes = [len(figure.html.encode()) for figure in StoredSteps(entries, None).figures]
    monkeypatch.setattr(steps, "MAX_STEP_BYTES", sum(sizes[:8]) + 10)
    stored = StoredSteps(entries, None)
    assert {(figure.run, figure.step) for figure in stored.figures} == {(0, 1), (1, 1), (0, NUM_STEPS), (1, NUM_STEPS)}
    assert stored.menu.ranges == f"1,4,{NUM_STEPS}"
    assert stored.menu.note == f"3 of {NUM_STEPS} steps; each step:"
    assert stored.menu.command == f"interlace watch {tmp_path / 'one'} {tmp_path / 'two'}"


def test_the_command_for_all_steps_finds_a_run_in_another_folder(tmp_path: Path) -> None:
    """The report of a sweep named the runs alone, which `interlace watch` looks for in runs/."""
    entry = entry_of(make_run(tmp_path, "seed-0"))
    for folder, word in ((ROOT / "seed-0", "seed-0"), (Path("runs/my sweep/seed-0"), "'runs/my sweep/seed-0'")):
        moved = replace(entry, run=replace(entry.run, folder=folder))
        assert StoredSteps([moved], None).menu.command == f"interlace watch {word}"


def test_steps_are_written_as_ranges_and_choices_are_parsed() -> None:
    assert format_ranges({1, 2, 3, 7, 9, 10}) == "1-3,7,9-10" and format_ranges(set()) == ""
    assert parse_choice("slowest") == "slowest" and parse_choice("12") == 12
    for text in ("", "-1", "1.5", "newest", "9" * 12):
        with pytest.raises(ValueError, match="Write a number, or one of middle, slowest, first, last"):
            parse_choice(text)
