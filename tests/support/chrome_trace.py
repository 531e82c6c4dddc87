"""Checks of a trace file: the rules of the Chrome Trace Event format, and further guarantees of this package."""

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    """Reads the events of a closed trace file."""
    found: list[Event] = json.loads(path.read_text())
    return found


def check_trace(events: list[Event]) -> None:
    """Checks that events are paired, tracks named, their slices disjoint, arrows paired and counters numeric."""
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert len(set(tracks.values())) == len(tracks), "two tracks of one name"
    slices = defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X", "b", "e", "s", "f", "C"), event
        assert event["pid"] in processes and isinstance(event["tid"], int)
        if event["ph"] == "M":
            continue
        assert isinstance(event["name"], str) and event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values())
            continue
        assert (event["pid"], event["tid"]) in tracks, "a track without a name"
        if event["ph"] == "X":
            assert event["dur"] >= 0, "an end that is before its begin"
            slices[event["pid"], event["tid"]].append((event["ts"], round(event["ts"] + event["dur"], 3)))
    for found in slices.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(found))), "slices overlap"
    _check_pairs(events)
    _check_arrows(events, slices)


def _check_pairs(events: list[Event]) -> None:
    begins, ends = ({(e["cat"], e["id"]): e for e in events if e["ph"] == kind} for kind in "be")
    assert len(begins) + len(ends) == sum(e["ph"] in "be" for e in events), "two of one number"
    assert begins.keys() == ends.keys(), "a begin without an end, or an end without a begin"
    for number, begin in begins.items():
        assert begin["name"] == ends[number]["name"] and begin["ts"] <= ends[number]["ts"]


def _check_arrows(events: list[Event], slices: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    ends = {kind: {e["id"]: e for e in events if e["ph"] == kind} for kind in "sf"}
    assert all(count == 1 for count in Counter((e["ph"], e["id"]) for e in events if e["ph"] in "sf").values())
    assert ends["s"].keys() == ends["f"].keys(), "an arrow with one end"
    for number, start in ends["s"].items():
        finish = ends["f"][number]
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"])
        assert start["ts"] <= finish["ts"], "trained on before it was generated"
        for end in (start, finish):
            assert any(low <= end["ts"] <= high for low, high in slices[end["pid"], end["tid"]]), "an end in no slice"


def tracks_of(events: list[Event], process: str) -> dict[int, str]:
    """Returns thread -> name for the tracks of a named process."""
    number = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process)
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == number}


def counters_of(events: list[Event]) -> dict[str, list[float]]:
    """Returns counter name -> values in order of time. If an event has several series, the name includes the series."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            for series, value in event["args"].items():
                name = event["name"] if series == "value" else f"{event['name']} {series}"
                found[name].append((event["ts"], value))
    return {name: [value for _, value in sorted(values, key=lambda pair: pair[0])] for name, values in found.items()}
