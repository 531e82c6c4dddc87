"""Times of samples, read from the worker tracks of a trace: turns, scoring and training."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from interlace.observe.trace_events import WORKER_PROCESS, Event

Key: TypeAlias = tuple[int, int]
"""Group and index of a sample."""
Name: TypeAlias = tuple[str, int]
"""Uid of the prompt and index of a sample, as operations after generation list them."""
Period: TypeAlias = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(kw_only=True, slots=True)
class TurnTime:
    """One turn of a sample on an engine, or the part of a turn up to an interruption. Times are seconds."""

    turn: int
    engine: str
    asked_s: float
    """Time of the request."""
    start_s: float
    end_s: float
    first_version: int
    last_version: int
    num_tokens: int | None = None
    """Sampled tokens. None if the turn was interrupted, or has not ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTimes:
    """Times of all samples of a trace."""

    turns: Mapping[Key, Sequence[TurnTime]] = field(default_factory=dict)
    scored: Mapping[Name, Sequence[Period]] = field(default_factory=dict)
    trained: Mapping[Name, Sequence[Period]] = field(default_factory=dict)

    @classmethod
    def read(cls, events: Sequence[Event]) -> "SampleTimes":
        """Reads the events of a trace. Traces of older versions of this package have no turns."""
        tracks = {
            event["tid"]: event["args"]["name"].rpartition(" rank ")[0]
            for event in events
            if event["pid"] == WORKER_PROCESS and event["ph"] == "M"
        }
        ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
        known: dict[Key, list[TurnTime]] = {}
        scored: dict[Name, list[Period]] = {}
        trained: dict[Name, list[Period]] = {}
        for event in events:
            if event["pid"] != WORKER_PROCESS or event["ph"] not in ("X", "b"):
                continue
            end_us: float = event["ts"]
            end_us = end_us + event["dur"] if event["ph"] == "X" else ends.get(event["id"], end_us)
            when, args = (event["ts"] / 1e6, end_us / 1e6), event["args"]
            _add_turns(known, event, tracks.get(event["tid"], ""), when)
            kind = scored if event["name"] == "reward.score" else trained if args.get("bin") == "train" else None
            if kind is not None:
                for name in _read_names(args.get("samples", ())):
                    kind.setdefault(name, []).append(when)
        return cls(turns=known, scored=scored, trained=trained)


def _add_turns(known: dict[Key, list[TurnTime]], event: Event, engine: str, when: Period) -> None:
    args = event["args"]
    version = args.get("version", 0)
    for group, index, turn, asked_us in args.get("begun", ()):
        turns = known.setdefault((group, index), [])
        asked_s = asked_us / 1e6
        for open_turn in turns:
            if open_turn.turn == turn and open_turn.num_tokens is None:  # it was interrupted and continues here
                open_turn.end_s = min(open_turn.end_s, when[0])
                asked_s = open_turn.end_s
        turns.append(
            TurnTime(
                turn=turn, engine=engine, asked_s=asked_s, start_s=when[0], end_s=float("inf"),
                first_version=version, last_version=version,
            )
        )  # fmt: skip
    for group, index, turn, num_tokens in args.get("ended", ()):
        for open_turn in reversed(known.get((group, index), ())):
            if open_turn.turn == turn:
                open_turn.end_s, open_turn.num_tokens, open_turn.last_version = when[1], num_tokens, version
                break


def _read_names(samples: Sequence[str]) -> Iterator[Name]:
    """Yields the samples of a list with entries such as `uid [0,2]`."""
    for entry in samples:
        uid, _, indices = entry.rpartition(" [")
        for index in indices.rstrip("]").split(","):
            if index.isdigit():
                yield uid, int(index)
