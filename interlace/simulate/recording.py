"""What a run did and when, read back from its folder."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interlace.core.errors import UserError
from interlace.core.types import GREEDY_INDEX, JSON, NO_BASELINE, FinishReason, RewardResult, SampleKey
from interlace.observe.run_folder import RunFolder
from interlace.observe.transcripts import read_transcripts
from interlace.runtime.trace import DEVICE_PROCESS, RUN_PROCESS, WORKER_PROCESS

Operation = tuple[str, str]
"""(name of a worker's track, operation)."""
NOT_SCORED = RewardResult(failure="not scored")


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """A sequence left an engine."""

    group: int | str
    """Its group's gid; the request's uid where it is in no group."""
    index: int
    num_tokens: int
    reason: FinishReason
    turn: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """One operation of one rank. Times are the run clock's seconds."""

    start_s: float
    returned_s: float
    """When the controller took its result in; infinite where it never did."""
    given: Sequence[JSON]
    """Samples, as a trace names them."""
    gave: int
    """Its result, where that is a whole number."""
    left: Sequence[Left]
    engine: tuple[int, int, int, float]
    """An engine's running, waiting and preempted sequences, and the use of its KV cache."""


UNRECORDED = RecordedCall(start_s=math.inf, returned_s=math.inf, given=(), gave=0, left=(), engine=(0, 0, 0, 0.0))
"""A call that began after the recording ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One run."""

    device_bytes: Sequence[int]
    """Memory of each device."""
    done_steps: int
    """Trained before, where it is of a resumed run: only what its last process did is in its timeline."""
    last_step: int
    """That ended; the first ever is 1."""
    is_whole: bool
    """Whether it is recorded to its end: what was killed is so up to the end of its last step."""
    calls: Mapping[Operation, Sequence[RecordedCall]]
    """Of each rank, in order of their beginnings."""
    completion_order: Sequence[SampleKey]
    uids: Mapping[int, str]
    """Group -> its prompt. Of a run that goes on, groups that ended in a step that is recorded: samples are written
    before the timeline, and may be steps ahead of it."""
    rewards: Mapping[SampleKey, RewardResult]
    """Of samples, and of greedy baselines whose scoring failed."""

    @classmethod
    def read(cls, folder: RunFolder) -> "Recording":
        """Raises UserError where the run left no timeline, or one that cannot be read."""
        events, is_whole = _events(folder)
        named = [event for event in events if event["ph"] == "M" and event["name"] == "thread_name"]
        tracks = {(event["pid"], event["tid"]): str(event["args"]["name"]) for event in named}
        if not all("memory_bytes" in event["args"] for event in named if event["pid"] == DEVICE_PROCESS):
            raise UserError(f"{folder.timeline} is of an earlier version of interlace, which recorded too little.")
        calls: dict[Operation, list[RecordedCall]] = defaultdict(list)
        for event, end_s in _calls(events):
            track = tracks[WORKER_PROCESS, event["tid"]]
            calls[track, event["name"].partition(".")[2]].append(_call(event, end_s))
        steps = [event["args"]["step"] for event in events if event["ph"] == "X" and event["pid"] == RUN_PROCESS]
        if not steps:
            raise UserError(f"{folder.path} recorded no whole step: there is nothing to replay.")
        rows: Sequence[Mapping[str, Any]] = [row for row in read_transcripts(folder.samples) if row["step"] >= steps[0]]
        if any("group" not in row for row in rows):
            raise UserError(f"{folder.path} was simulated: no worker's times were recorded that could be replayed.")
        return cls(
            device_bytes=[event["args"]["memory_bytes"] for event in named if event["pid"] == DEVICE_PROCESS],
            done_steps=steps[0] - 1,
            last_step=steps[-1],
            is_whole=is_whole,
            calls=calls,
            completion_order=_completion_order([call for of_rank in calls.values() for call in of_rank]),
            uids={int(row["group"]): str(row["uid"]) for row in rows if is_whole or row["step"] <= steps[-1]},
            rewards={
                **{SampleKey(int(row["group"]), int(row["index"])): _reward(row) for row in rows},
                **{SampleKey(int(row["group"]), GREEDY_INDEX): NOT_SCORED for row in rows if _has_no_baseline(row)},
            },
        )


def _events(folder: RunFolder) -> tuple[list[dict[str, Any]], bool]:
    """(events, whether all are there)."""
    try:
        text = folder.timeline.read_text(encoding="utf-8").rstrip()
    except OSError as error:
        raise UserError(
            f"{folder.path} has no {folder.timeline.name}: was it run with logging.timeline=false?"
        ) from error
    # A run that was killed leaves out the closing bracket, as the format allows.
    is_whole = text.endswith("]")
    try:
        found: list[dict[str, Any]] = json.loads(text if is_whole else text.rstrip(",") + "]")
    except json.JSONDecodeError as error:
        raise UserError(f"{folder.timeline} cannot be read: {error}") from error
    return found, is_whole


def _calls(events: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """(call of a worker, when it ended), in order of their beginnings."""
    workers = [event for event in events if event["pid"] == WORKER_PROCESS]
    beside = {(event["cat"], event["id"]): event["ts"] for event in workers if event["ph"] == "e"}
    calls = [(event, (event["ts"] + event["dur"]) / 1e6) for event in workers if event["ph"] == "X"]
    calls += [(event, beside[event["cat"], event["id"]] / 1e6) for event in workers if event["ph"] == "b"]
    return sorted(calls, key=lambda call: float(call[0]["ts"]))


def _call(event: Mapping[str, Any], end_s: float) -> RecordedCall:
    args = event["args"]
    running, waiting, preempted, kv_use = args.get("engine", (0, 0, 0, 0.0))
    return RecordedCall(
        start_s=event["ts"] / 1e6,
        returned_s=_returned_s(args, end_s),
        given=args.get("samples", ()),
        gave=args.get("gave", 0),
        left=[
            Left(
                group=group,
                index=index,
                num_tokens=num_tokens,
                reason=FinishReason(reason),
                turn=turn[0] if turn else 0,
            )
            for group, index, num_tokens, reason, *turn in args.get("left", ())
        ],
        engine=(running, waiting, preempted, kv_use),
    )


def _returned_s(args: Mapping[str, Any], end_s: float) -> float:
    if "unfinished" in args or "no_result" in args:
        return math.inf
    return float(args["returned_us"]) / 1e6 if "returned_us" in args else end_s


def _completion_order(calls: Sequence[RecordedCall]) -> list[SampleKey]:
    return [
        SampleKey(left.group, left.index)
        for call in sorted(calls, key=lambda call: call.returned_s)
        for left in call.left
        if isinstance(left.group, int) and left.index >= 0 and left.reason != FinishReason.ABORTED
    ]


def _reward(row: Mapping[str, Any]) -> RewardResult:
    if row["reward"] is None:
        return RewardResult(failure=str(row.get("reason", NOT_SCORED.failure)))
    return RewardResult(reward=float(row.get("scored", row["reward"])))


def _has_no_baseline(row: Mapping[str, Any]) -> bool:
    """Whether a sample failed because its group's greedy response did."""
    return str(row.get("reason", "")).startswith(NO_BASELINE)
