"""The timeline: intervals add up, and what is written opens as a Chrome trace."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from interlace.runtime.timeline import Span, Timeline, busy_seconds
from interlace.schedule.placement import Device


def span(start: float, end: float, *, device: int = 0, group: str = "rollout/0", rank: int = 0) -> Span:
    return Span(
        start_s=start, end_s=end, devices=(device,), group=group, rank=rank, operation="serve", cause="generate"
    )


def test_overlapping_spans_count_once_and_only_within_the_window() -> None:
    assert busy_seconds([span(0, 2), span(1, 3), span(5, 9)], 0.5, 6) == 3.5


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))), st.integers(0, 20), st.integers(0, 20))
def test_busy_time_is_what_counting_seconds_gives(pairs: list[tuple[int, int]], low: int, high: int) -> None:
    spans = [span(min(pair), max(pair)) for pair in pairs]
    start, end = min(low, high), max(low, high)
    seconds = sum(any(each.start_s <= second < each.end_s for each in spans) for second in range(start, end))
    assert busy_seconds(spans, start, end) == seconds


def test_the_trace_has_a_track_a_device_and_a_worker(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add(span(0.0, 1.0))
    timeline.add(span(0.5, 1.5, device=1, group="actor/0"))
    timeline.add(span(0.5, 1.5, device=1, group="actor/0", rank=1))
    devices = [Device(index=i, pool="cpu", pool_index=i, memory_bytes=1) for i in range(2)]
    timeline.write(tmp_path / "timeline.json", devices)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"cpu:0", "cpu:1", "rollout/0 rank 0", "actor/0 rank 0", "actor/0 rank 1"}
    complete = [event for event in events if event["ph"] == "X"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} <= named
    assert sum(event["name"] == "actor.serve" for event in complete) == 3, "once for the device, once for each rank"
