"""The lanes of samples agree with the trace and the transcripts of the run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from interlace.core.types import SampleKey
from interlace.observe.report.device_time import DeviceTimeline
from interlace.observe.report.sample_lanes import KINDS, lanes_view
from interlace.observe.run_data import RunData, Transcript
from interlace.runtime.timeline import EngineCall, Records, Span, StepRecord, TurnEnd, TurnStart
from interlace.runtime.trace import TraceFile
from interlace.schedule.placement import Device
from interlace.schedule.presets import load_schedule
from tests.support.cost_workers import Costs
from tests.support.sim_run import Workload, simulate

WORK = Workload(num_devices=4, num_steps=4, costs=Costs(train_token=1e-3))
DEVICES = tuple(Device(index=i, pool="cpu", pool_index=i, memory_bytes=100) for i in range(4))


@pytest.mark.parametrize("schedule", ["verl-colocated", "areal", "one-step-off"])
def test_each_trained_sample_of_a_run_has_one_turn_with_its_versions(tmp_path: Path, schedule: str) -> None:
    path = tmp_path / "timeline.json"
    record = simulate(load_schedule(schedule), WORK, recorder=TraceFile(path, DEVICES))
    timeline = DeviceTimeline.read(path)
    assert timeline is not None
    trained = [ended.sample for ended in record.entries if ended.event == "trained"]
    assert len(trained) == WORK.num_steps * WORK.prompts_per_step * WORK.samples_per_prompt
    for sample in trained:
        ends = [turn for turn in timeline.samples.turns[tuple(sample.key)] if turn.num_tokens is not None]
        assert [turn.num_tokens for turn in ends] == [sample.num_tokens]
        assert ends[0].asked_s <= ends[0].start_s < ends[0].end_s
        first, *_, last = [*sample.versions.values, sample.versions.values[-1]]
        pieces = timeline.samples.turns[tuple(sample.key)]
        assert (pieces[0].first_version, ends[0].last_version) == (first, last)
        assert timeline.samples.trained[sample.uid, sample.key.index][0][0] >= ends[0].end_s


def serve(
    start_s: float, end_s: float, version: int, begun: Sequence[TurnStart], ended: Sequence[TurnEnd]
) -> EngineCall:
    span = Span(
        start_s=start_s, end_s=end_s, devices=(0,), group="rollout/0", rank=0, operation="serve", cause="generate",
        step=1, version=version, bin="generate",
    )  # fmt: skip
    return EngineCall(
        span=span, devices=(0,), batch=1, num_new_tokens=1, num_prompt_tokens=1, num_repeated_tokens=0, begun=begun,
        ended=ended,
    )  # fmt: skip


def test_queue_turns_tool_and_interruption_are_the_periods_of_the_trace(tmp_path: Path) -> None:
    key = SampleKey(7, 1)
    calls = [
        serve(1.0, 2.0, 3, [TurnStart(*key, 0, 0.5)], []),
        serve(2.5, 4.0, 4, [TurnStart(*key, 0, 0.5)], [TurnEnd(*key, 0, 9)]),  # the first call was interrupted
        serve(6.0, 7.0, 4, [TurnStart(*key, 1, 5.5)], [TurnEnd(*key, 1, 2)]),
    ]
    trace = TraceFile(tmp_path / "timeline.json", DEVICES[:1])
    trace.close(
        Records(
            spans=[call.span for call in calls], running=[], served=calls, num_dropped_tokens=0, end_s=8.0,
            steps=[StepRecord(step=1, start_s=0.0, end_s=8.0, counts={})],
        )
    )  # fmt: skip
    sample = Transcript(
        step=1, uid="p", prompt="", response="", num_tokens=11, reward=1.0, version_min=3, version_max=4,
        event="trained", key=(7, 1), tools=[(0, 1.0)],
    )  # fmt: skip
    run = RunData(name="run", folder=tmp_path, rows=(), transcripts=[sample])
    view = lanes_view(run, DeviceTimeline.read(tmp_path / "timeline.json"), None)
    assert view is not None and (view.step, view.seconds, view.num_more) == (1, 6.5, 0)
    [lane] = view.lanes
    seconds = dict(zip(KINDS, lane.seconds, strict=True))
    # The interrupted part ends when the rest begins, because the trace has no earlier end.
    assert seconds == {"queue": 1.0, "generate": 4.0, "tool": 1.0, "episode": 0.5, "reward": 0.0, "train": 0.0}
    assert (lane.num_turns, lane.num_tokens, lane.versions, lane.waiting_s) == (2, 11, "versions 3 to 4", 0.0)
    assert [name for name, _ in view.legend] == ["turn, version 3", "turn, version 4", "queue", "tool", "episode"]


def test_a_trace_without_turns_has_no_lanes(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "timeline.json", DEVICES[:1])
    step = StepRecord(step=1, start_s=0.0, end_s=8.0, counts={})
    trace.close(Records(spans=[], running=[], served=[], num_dropped_tokens=0, end_s=8.0, steps=[step]))
    run = RunData(name="run", folder=tmp_path, rows=(), transcripts=[])
    assert lanes_view(run, DeviceTimeline.read(tmp_path / "timeline.json"), None) is None
    assert lanes_view(run, None, None) is None
