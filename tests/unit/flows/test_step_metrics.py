"""The metrics of a step depend on its samples, not on the order of their ends."""

import asyncio
from dataclasses import replace

from interlace.core.types import EMPTY_INT, Prompt, RewardResult, Sample, SampleKey
from interlace.flows.step_metrics import StepMeter, WaitMeter, _rewards
from interlace.observe.progress import estimate_time_left
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.sim.loop import VirtualLoop
from interlace.runtime.timeline import EngineCall, Span, TurnStart
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from interlace.stages.batches import Batch
from tests.unit.observe.report.test_sample_lanes import serve

PROMPT = Prompt(uid="q", token_ids=EMPTY_INT, text="", answer="")


def test_reward_metrics_do_not_depend_on_the_order_in_which_samples_ended() -> None:
    samples = [
        Sample(key=SampleKey(0, index), prompt=PROMPT, reward=value, reward_parts={"task": value})
        for index, value in enumerate((0.1, 0.2, 0.3))
    ]
    assert _rewards(samples) == _rewards(samples[::-1])


def test_accuracy_is_left_out_if_the_function_of_a_source_gives_numbers() -> None:
    """Responses without `reward.tag` are wrong, and they alone had a verdict: the mean of all of them was 0."""

    def make_samples(source: str, *parts: dict[str, float]) -> list[Sample]:
        prompt = Prompt(uid="q", token_ids=EMPTY_INT, text="", answer="", source=source)
        return [
            Sample(key=SampleKey(0, index), prompt=prompt, reward=0.5, reward_parts=each)
            for index, each in enumerate(parts)
        ]

    numbers = make_samples("numbers", {"accuracy": 0.0}, {})
    verdicts = make_samples("verdicts", {"accuracy": 0.0}, {"accuracy": 1.0})
    assert "reward/accuracy" not in _rewards(numbers, adds_verdicts=True)
    by_episode = replace(make_samples("verdicts", {})[0], outcome=RewardResult(reward=0.5))
    assert _rewards([*numbers, *verdicts, by_episode], adds_verdicts=True)["reward/accuracy"] == 0.5


def test_a_part_with_the_name_accuracy_may_be_absent_from_some_samples() -> None:
    """A function of a sum that returned None for one row removed the metric of its part."""
    samples = [
        Sample(key=SampleKey(0, index), prompt=PROMPT, reward=0.5, reward_parts=parts)
        for index, parts in enumerate(({"accuracy": 0.5, "form": 0.0}, {"form": 0.5}))
    ]
    assert _rewards(samples)["reward/accuracy"] == 0.5


def make_call(start_s: float, *begun: TurnStart) -> EngineCall:
    return serve(start_s, start_s + 1, 0, begun, ())


def test_the_oldest_wait_leaves_out_a_turn_that_continues_after_an_interruption() -> None:
    waits, first, second = WaitMeter(), TurnStart(0, 0, 0, 1.0), TurnStart(0, 1, 0, 1.5)
    waits.add_calls([make_call(2.0, first), make_call(4.0, second)])
    assert waits.take_oldest([]) == 2.5
    waits.add_calls([make_call(9.0, first)])
    assert waits.take_oldest([SampleKey(0, 0)]) == 0.0, "it continues in the next step"
    waits.add_calls([make_call(9.0, TurnStart(0, 0, 0, 8.0))])
    assert waits.take_oldest([]) == 1.0, "the group was drawn again"


def test_a_turn_that_began_during_an_evaluation_did_not_wait_until_it_continued() -> None:
    """Its first call was not counted, so the step after the evaluation had the time of its decoding as a wait."""

    async def measure() -> float:
        device = Device(index=0, pool="cpu", pool_index=0, memory_bytes=1)
        cluster = SimCluster((device,), Schedule(), hang_after_s=1e6)
        meter, turn = StepMeter(cluster), TurnStart(0, 0, 0, 1.0)
        cluster.timeline.serve(make_call(2.0, turn))
        meter.start()
        cluster.timeline.serve(make_call(9.0, turn))
        return meter.measure(Batch(0, 1, cluster.waits, pending=list), 0, [], 0)["sched/oldest_wait_s"]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(measure()) == 1.0


def test_the_duration_of_calls_leaves_out_those_that_still_run() -> None:
    """A call that ran at the end of a step had no end: its duration, and the mean of the step, was infinite."""

    async def measure() -> float:
        device = Device(index=0, pool="cpu", pool_index=0, memory_bytes=1)
        cluster = SimCluster((device,), Schedule(), hang_after_s=1e6)
        fields = {"devices": (), "group": "reward", "rank": 0, "operation": "score", "cause": "reward"}
        meter, spans = StepMeter(cluster), [Span(start_s=0, **fields, step=1, version=0, phase="reward") for _ in "ab"]
        meter.start()
        for span in spans:
            cluster.timeline.begin(span)
        await cluster.clock.sleep(5.0)
        cluster.timeline.end(spans[0], 1.0, 3.0)
        return meter.measure(Batch(0, 1, cluster.waits, pending=list), 0, [], 0)["perf/reward_call_s"]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(measure()) == 2.0


def test_the_time_left_is_that_of_the_remaining_steps_at_the_pace_of_the_last_eight() -> None:
    assert estimate_time_left([100.0, *[2.0] * 8], 5) == 10.0
    assert estimate_time_left([3.0], 0) == 0.0
