"""A simulated engine takes the time of its costs, and loses no token."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.core.types import FinishReason, Request, Response, SampleKey, SamplingParams
from interlace.forecast.costs.batch import HEADROOM, SimulatedBatch
from interlace.forecast.costs.pace import Pace
from interlace.forecast.costs.rollout import SimulatedEngine
from interlace.forecast.profile.types import Profile, RolloutCosts, TrainCosts
from interlace.runtime.sim.loop import VirtualLoop, virtual_loop
from interlace.runtime.worker import WorkerContext
from interlace.weights.ref import WeightRef

T = TypeVar("T")
COSTS = RolloutCosts(
    steps=((1, 0.01), (11, 0.02)), context_token_s=1e-4, prefill_token_s=1e-3, call_s=0.005, kv_tokens=10_000
)


def engine_of(costs: RolloutCosts, lengths: Sequence[int], num_devices: int = 1) -> SimulatedEngine:
    devices = tuple(f"sim:{n}" for n in range(num_devices))
    context = WorkerContext(group="rollout/0", rank=0, num_ranks=1, devices=devices)
    pace = Pace(Profile(device="", device_memory_bytes=1, rollout=costs, actor=TrainCosts(token_s=0)))
    return SimulatedEngine(context, costs, lambda request: lengths[request.owner.gid], pace)


def request(serial: int, *, num_prompt_tokens: int = 5, max_new_tokens: int = 1000) -> Request:
    return Request(
        uid=f"p{serial}",
        owner=SampleKey(serial, 0),
        prompt_ids=[1] * num_prompt_tokens,
        params=SamplingParams(max_new_tokens=max_new_tokens),
    )


def on_virtual_clock(main: Callable[[], Awaitable[T]]) -> tuple[T, float]:
    """(result, virtual seconds)."""
    loop = VirtualLoop()

    async def timed() -> tuple[T, float]:
        return await main(), loop.time()

    try:
        return loop.run_until_complete(timed())
    finally:
        loop.close()


async def serve_all(engine: SimulatedEngine, requests: Sequence[Request]) -> list[Response]:
    responses: list[Response] = []
    fresh = requests
    while len(responses) < len(requests):
        progress = await engine.serve(fresh, ())
        responses += progress.responses
        fresh = []
    return responses


def test_one_sequence_costs_its_prefill_and_a_step_a_token_that_reads_what_is_cached() -> None:
    async def main() -> list[Response]:
        return await serve_all(engine_of(COSTS, [4]), [request(0)])

    responses, seconds = on_virtual_clock(main)
    assert len(responses[0].token_ids) == 4
    assert responses[0].finish_reason == FinishReason.STOP
    reads = sum(5 + step for step in range(4)) * 1e-4
    assert seconds == pytest.approx(0.005 + 5e-3 + 4 * 0.01 + reads)


def test_sequences_that_decode_together_share_steps_and_leave_as_they_finish() -> None:
    async def main() -> list[Response]:
        return await serve_all(
            engine_of(COSTS.model_copy(update={"context_token_s": 0.0}), [10, 3]), [request(0), request(1)]
        )

    responses, seconds = on_virtual_clock(main)
    assert [response.request.owner.gid for response in responses] == [1, 0]
    assert seconds == pytest.approx(2 * 0.005 + 10e-3 + 3 * 0.011 + 7 * 0.010)


def test_a_young_call_goes_on_when_a_sequence_ends() -> None:
    """The first ends after 39 ms, the next with the step that is begun before 45 ms are over."""
    costs = COSTS.model_copy(
        update={"context_token_s": 0.0, "prefill_token_s": 0.0, "call_s": 0.0, "min_call_s": 0.045}
    )

    async def main() -> list[int]:
        engine = engine_of(costs, [3, 4, 20, 9])
        calls = [await engine.serve([request(serial) for serial in range(4)], ())]
        while calls[-1].num_running:
            calls.append(await engine.serve([], ()))
        return [len(call.responses) for call in calls]

    finished, seconds = on_virtual_clock(main)
    assert finished == [2, 1, 1]
    assert seconds == pytest.approx(3 * 0.013 + 0.012 + 5 * 0.011 + 11 * 0.01)


@pytest.mark.parametrize(
    ("max_running", "seconds"),
    [
        (4, 0.005 + 5e-3 + 4 * 0.013),
        (1, 4 * (0.005 + 5e-3 + 4 * 0.010)),  # nobody keeps the prompt for those that wait
    ],
)
def test_a_prompt_is_computed_once_for_samples_that_run_together(max_running: int, seconds: float) -> None:
    group = [
        Request(uid="p0", owner=SampleKey(0, index), prompt_ids=[1] * 5, params=SamplingParams(max_new_tokens=4))
        for index in range(4)
    ]
    costs = COSTS.model_copy(update={"context_token_s": 0.0, "max_running": max_running})

    async def main() -> list[Response]:
        return await serve_all(engine_of(costs, [9]), group)

    assert on_virtual_clock(main)[1] == pytest.approx(seconds)


@pytest.mark.parametrize(("max_running", "seconds"), [(4, 0.005 + 0.1 + 4 * 0.013), (1, 4 * (0.005 + 0.1 + 4 * 0.010))])
def test_each_pass_in_which_sequences_begin_has_its_cost(max_running: int, seconds: float) -> None:
    """A full engine, in which one sequence begins when another one ends, had this cost once for each call."""
    changes = {"context_token_s": 0.0, "prefill_token_s": 0.0, "intake_s": 0.1, "max_running": max_running}
    costs = COSTS.model_copy(update=changes)

    async def main() -> list[Response]:
        return await serve_all(engine_of(costs, [4] * 4), [request(serial) for serial in range(4)])

    assert on_virtual_clock(main)[1] == pytest.approx(seconds)


def test_a_request_that_waits_costs_nothing_when_it_is_withdrawn_and_submitted_again() -> None:
    """`abort_resume` does this to all requests of an engine at each publication."""
    costs = COSTS.model_copy(
        update={"context_token_s": 0.0, "prefill_token_s": 0.0, "sequence_s": 0.1, "max_running": 1}
    )

    async def main() -> None:
        engine = engine_of(costs, [1] * 5)
        waiting = [request(serial) for serial in range(1, 5)]
        await engine.serve([request(0), *waiting], ())
        assert len(await engine.abort()) == 4
        await serve_all(engine, waiting)

    _, seconds = on_virtual_clock(main)
    assert seconds == pytest.approx(5 * (0.005 + 0.1 + 0.010))


def test_a_sequence_that_loses_its_cells_is_charged_once() -> None:
    costs = COSTS.model_copy(update={"kv_tokens": 100, "prefill_token_s": 0.0})

    async def main(sequence_s: float) -> list[Response]:
        engine = engine_of(costs.model_copy(update={"sequence_s": sequence_s}), [40] * 4)
        return await serve_all(engine, [request(serial) for serial in range(4)])

    (_, with_cost), (_, without) = (on_virtual_clock(lambda s=s: main(s)) for s in (0.1, 0.0))
    assert with_cost - without == pytest.approx(4 * 0.1)


def test_two_devices_are_faster_by_their_efficiency() -> None:
    costs = COSTS.model_copy(update={"efficiency": 0.8, "call_s": 0.0, "prefill_token_s": 0.0})

    async def main(num_devices: int) -> list[Response]:
        return await serve_all(engine_of(costs, [50], num_devices), [request(0)])

    one, two = (on_virtual_clock(lambda n=n: main(n))[1] for n in (1, 2))
    assert one / two == pytest.approx(1.6)


def test_the_cache_of_an_engine_has_the_size_that_is_set_on_any_number_of_devices() -> None:
    """An engine on two devices had twice the tokens of rollout.max_tokens."""
    fixed = COSTS.model_copy(update={"kv_tokens": 100, "engine_kv_tokens": 100})
    assert [SimulatedBatch(fixed, lambda _: 1, count).capacity for count in (1, 2)] == [100, 100]
    free = COSTS.model_copy(update={"kv_tokens": 100})
    assert [SimulatedBatch(free, lambda _: 1, count).capacity for count in (1, 2)] == [100, 200]


def test_the_limit_of_the_request_ends_it_by_length() -> None:
    async def main() -> list[Response]:
        return await serve_all(engine_of(COSTS, [50]), [request(0, max_new_tokens=7)])

    completion = on_virtual_clock(main)[0][0]
    assert len(completion.token_ids) == 7 and completion.finish_reason == FinishReason.LENGTH


def test_an_interrupt_ends_the_call_after_the_step_that_runs() -> None:
    async def main() -> tuple[int, float]:
        engine = engine_of(COSTS.model_copy(update={"context_token_s": 0.0}), [100])
        loop = asyncio.get_running_loop()
        loop.call_later(0.0255, engine.interrupt)  # call and prefill take 0.010 of it: in the second step
        progress = await engine.serve([request(0)], ())
        return progress.num_new_tokens, loop.time()

    (num_new_tokens, seconds), _ = on_virtual_clock(main)
    assert num_new_tokens == 2 and seconds == pytest.approx(0.030)


def test_each_token_carries_the_version_that_made_it_over_an_update_an_abort_and_a_resumption() -> None:
    async def main() -> Response:
        first, second = engine_of(COSTS, [100]), engine_of(COSTS, [100])
        await first.update_weights(WeightRef(version=3), "keep")
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, first.interrupt)
        await first.serve([request(0)], ())
        await first.update_weights(WeightRef(version=4), "keep")
        loop.call_later(0.2, first.interrupt)
        await first.serve((), ())
        (partial,) = await first.abort()
        await second.update_weights(WeightRef(version=5), "keep")
        return (await serve_all(second, [partial.resumed]))[0]

    done = on_virtual_clock(main)[0]
    assert len(done.token_ids) == len(done.logprobs) == len(done.versions) == 100
    assert sorted(done.versions) == list(done.versions) and set(done.versions) == {3, 4, 5}


def test_what_began_ends_under_its_own_version_beside_the_new_one_at_the_cost_of_two_batches() -> None:
    async def main() -> tuple[list[Response], float, float]:
        engine, loop = engine_of(COSTS.model_copy(update={"context_token_s": 0.0}), [100, 10]), virtual_loop()
        await engine.update_weights(WeightRef(version=3), "own")
        loop.call_later(0.2, engine.interrupt)
        await engine.serve([request(0)], ())
        await engine.update_weights(WeightRef(version=4), "own")
        served, began_s = engine.engine_metrics()["older_versions"], loop.now_s
        (short,) = (await engine.serve([request(1)], ())).responses
        seconds = loop.now_s - began_s
        (long,) = (await engine.serve((), ())).responses
        await engine.update_weights(WeightRef(version=5), "own")
        return [short, long], served - engine.engine_metrics()["older_versions"], seconds

    ((short, long), fewer, seconds), _ = on_virtual_clock(main)
    assert set(short.versions) == {4} and set(long.versions) == {3}
    assert fewer == 1
    assert seconds == pytest.approx(COSTS.call_s + 5 * COSTS.prefill_token_s + 10 * 2 * COSTS.step_s(1))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(20, 200),
    st.lists(st.floats(0.001, 0.5), max_size=6),
)
def test_a_tiny_cache_preempts_and_every_sequence_still_ends_once_with_all_its_tokens(
    lengths: list[int], kv_tokens: int, interrupts: list[float]
) -> None:
    costs = COSTS.model_copy(update={"kv_tokens": kv_tokens})

    async def main() -> list[Response]:
        engine = engine_of(costs, lengths)
        for seconds in interrupts:
            asyncio.get_running_loop().call_later(seconds, engine.interrupt)
        responses = await serve_all(engine, [request(serial) for serial in range(len(lengths))])
        assert not engine.batch.running and not engine.batch.waiting and engine.batch.num_cached == 0
        return responses

    responses, _ = on_virtual_clock(main)
    found = {response.request.owner.gid: len(response.token_ids) for response in responses}
    assert len(responses) == len(lengths) and found == dict(enumerate(lengths))


def token_by_token(lengths: Sequence[int], capacity: int, reserve: int) -> list[tuple[int, float]]:
    """(sequence, when it ended) of prompts of five tokens, one decode step after another."""
    waiting, running = deque((serial, 0) for serial in range(len(lengths))), dict[int, int]()
    ended, now_s = list[tuple[int, float]](), 0.0

    def cached() -> int:
        return sum(5 + done for done in running.values())

    while waiting or running:
        while waiting and (not running or cached() + 5 + waiting[0][1] + reserve <= capacity):
            running.update([waiting.popleft()])
        while len(running) > 1 and cached() + len(running) > capacity:
            waiting.appendleft(running.popitem())
        now_s += COSTS.step_s(len(running)) + COSTS.context_token_s * cached()
        running = {serial: done + 1 for serial, done in running.items()}
        ended += [(serial, now_s) for serial, done in running.items() if done == lengths[serial]]
        running = {serial: done for serial, done in running.items() if done < lengths[serial]}
    return ended


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=9), capacity=st.integers(410, 1600))
def test_engines_that_look_ahead_end_as_those_that_go_token_by_token(lengths: list[int], capacity: int) -> None:
    """Also where the cache is full again and again before a sequence ends."""
    costs = COSTS.model_copy(update={"call_s": 0.0, "prefill_token_s": 0.0, "kv_tokens": capacity})

    async def main() -> list[tuple[int, float]]:
        engine, ended = engine_of(costs, lengths), list[tuple[int, float]]()
        progress = await engine.serve([request(serial) for serial in range(len(lengths))], ())
        while True:
            now_s = asyncio.get_running_loop().time()
            ended += [(each.request.owner.gid, now_s) for each in progress.responses]
            if not progress.num_running + progress.num_waiting:
                return ended
            progress = await engine.serve((), ())

    found, _ = on_virtual_clock(main)
    expected = token_by_token(lengths, capacity, int(HEADROOM * capacity))
    assert sorted(serial for serial, _ in found) == sorted(range(len(lengths)))
    assert sorted(found) == [(serial, pytest.approx(at_s)) for serial, at_s in sorted(expected)]
