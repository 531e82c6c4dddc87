"""timeline.json is a valid Chrome trace of a run's operations."""

from dataclasses import replace
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.core.row import SampleLabel
from interlace.forecast.profile.from_run import read_trace
from interlace.observe.report.device_time import DeviceTimeline
from interlace.runtime.timeline import EngineCall, Records, Span
from interlace.runtime.trace import TraceFile
from interlace.schedule.placement import Device
from interlace.schedule.presets import load_schedule, preset_names
from tests.support.chrome_trace import Event, check_trace, counters_of, events_of, tracks_of
from tests.support.cost_workers import Costs
from tests.support.sim_run import Workload, simulate

WORK = Workload(num_devices=4, num_steps=4, costs=Costs(train_token=1e-3))
DEVICES = tuple(Device(index=i, pool="cpu", pool_index=i, memory_bytes=100) for i in range(4))


def trace_of(path: Path, schedule: str) -> list[Event]:
    simulate(load_schedule(schedule), WORK, recorder=TraceFile(path, DEVICES))
    return events_of(path)


@pytest.mark.parametrize("name", preset_names())
def test_a_run_under_every_preset_is_a_valid_trace(tmp_path: Path, name: str) -> None:
    events = trace_of(tmp_path / "timeline.json", name)
    check_trace(events)
    assert list(tracks_of(events, "devices").values()) == [device.name for device in DEVICES]
    trained = {event["args"]["group"] for event in events if event["ph"] == "s"}
    assert len(trained) >= WORK.num_steps * WORK.prompts_per_step, "an arrow for each group that was trained on"
    steps = DeviceTimeline.read(tmp_path / "timeline.json").steps  # type: ignore[union-attr]
    assert list(steps) == [1, 2, 3, 4]


def test_a_track_a_worker_and_counters_of_engines_and_staleness(tmp_path: Path) -> None:
    events = trace_of(tmp_path / "timeline.json", "areal")
    workers = tracks_of(events, "workers").values()
    assert {"rollout/0 rank 0", "actor/0 rank 0", "reward rank 0"} <= set(workers)
    counted = counters_of(events)
    assert max(counted["rollout/0 running sequences"]) > 1 and counted["rollout/0 running sequences"][-1] == 0
    assert {"rollout/0 queued requests", "rollout/0 KV use", "samples in flight", "staleness mean"} <= set(counted)
    assert max(counted["staleness max"]) >= 1


def test_a_slice_says_why_for_which_step_with_which_version_and_on_which_samples(tmp_path: Path) -> None:
    events = trace_of(tmp_path / "timeline.json", "verl-colocated")
    named = {event["name"]: event["args"] for event in events if event["ph"] == "X"}
    training = named["actor.accumulate"]
    assert (training["cause"], training["step"], training["version"]) == ("train", 4, 3)
    assert sorted(training["samples"])[0] == "p12 [0,1,2]"
    assert named["rollout.update_weights"]["cause"] == "publication"
    assert named["rollout.update_weights"]["version"] == 4
    assert named["reward.score"]["cause"] == "reward"


def span(start: float, end: float = float("inf")) -> Span:
    return Span(
        start_s=start, end_s=end, devices=(0,), group="reward", rank=0, operation='"<score>"', cause="", step=1,
        version=0,
    )  # fmt: skip


def records(spans: list[Span], running: list[Span], end_s: float) -> Records:
    return Records(spans=spans, running=running, served=[], steps=[], num_dropped_tokens=0, end_s=end_s)


def test_what_overlaps_stands_beside_its_track_and_what_never_ended_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    trace = TraceFile(path, DEVICES[:1])
    trace.keep(records([span(1, 3), span(0, 2), span(3, 4)], [], 4.0))
    half = DeviceTimeline.read(path)
    assert half is not None and len(half.bars) == 2, "a run that goes on can be looked at"
    trace.close(records([], [span(4.5)], 6.0))
    events = events_of(path)
    check_trace(events)
    assert list(tracks_of(events, "workers").values()) == ["reward rank 0"]
    beside = [(event["ph"], event["ts"]) for event in events if event["ph"] in "be" and event["pid"] == 3]
    assert beside == [("b", 1e6), ("e", 3e6)]
    [unfinished] = [event for event in events if event["pid"] == 3 and event.get("args", {}).get("unfinished")]
    assert (unfinished["ts"], unfinished["dur"]) == (4.5e6, 1.5e6)


def test_a_surplus_sample_that_finishes_after_training_moves_no_arrow(tmp_path: Path) -> None:
    def generated(start: float, end: float) -> Span:
        return replace(span(start, end), group="rollout/0", bin="generate", finished_groups=(5,))

    label = SampleLabel(uid="p", gid=5, number=0)
    training = replace(span(2.0, 4.0), bin="train", samples=(label,))
    trace = TraceFile(tmp_path / "timeline.json", DEVICES)
    calls = [generated(0.0, 1.0), generated(1.5, 3.0)]
    served = [
        EngineCall(span=call, devices=(0,), batch=1, num_new_tokens=1, num_prompt_tokens=1, num_repeated_tokens=0)
        for call in calls
    ]
    trace.close(replace(records([*calls, training], [], 4.0), served=served))
    [arrow] = [event for event in events_of(tmp_path / "timeline.json") if event["ph"] == "s"]
    assert arrow["ts"] == 1e6 - 1


def test_a_file_that_ends_in_the_middle_of_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    trace = TraceFile(path, DEVICES[:1])
    trace.close(records([span(0, 1), span(2, 3)], [], 4.0))
    path.write_text(path.read_text()[:-30])
    read = DeviceTimeline.read(path)
    assert read is not None and len(read.bars) == 2 and not read.note


def test_damaged_lines_are_left_out_and_counted_by_every_reader(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    trace = TraceFile(path, DEVICES[:1])
    trace.close(records([span(0, 1), span(2, 3), span(4, 5)], [], 6.0))
    lines = path.read_bytes().splitlines(keepends=True)
    device, worker = (
        next(place for place, line in enumerate(lines) if b'"ts":2' in line and b'"pid":%d' % pid in line)
        for pid in (2, 3)
    )
    lines[device], lines[worker] = lines[device][:30] + b"\n", lines[worker].replace(b'"dur"', b'"d\xff"')
    path.write_bytes(b"".join(lines))
    read, slices = DeviceTimeline.read(path), read_trace(path)
    assert read is not None and [bar.start_s for bar in read.bars] == [0, 4]
    assert [each.span.start_s for each in slices.slices] == [0, 4]
    assert read.note == slices.note == "2 damaged lines of timeline.json are left out"
    path.write_text("no trace\nat all\n")
    with pytest.raises(UserError, match="none of its 2 lines is an event"):
        DeviceTimeline.read(path)
