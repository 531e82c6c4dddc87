"""Later turns go to the right engine, and kept contexts are evicted in the right order."""

import math

from hypothesis import given
from hypothesis import strategies as st

from interlace.core.kv_eviction import FEW, ReturnTimes, first_to_go
from interlace.schedule.dispatch import Load, create_dispatch
from interlace.schedule.loads import KeptContext, Loads, route

PREFILL_COST = 0.5
NAMES = ("round_robin", "least_tokens", "longest_first", "skew_aware")
WAVES = st.lists(
    st.lists(st.tuples(st.floats(1, 500), st.integers(0, 4), st.integers(0, 2000)), min_size=1, max_size=20), max_size=8
)


def loads(*tokens: float) -> list[Load]:
    return [Load(num_requests=0, live_tokens=each) for each in tokens]


def gap(now: list[Load]) -> float:
    live = [load.live_tokens for load in now]
    return max(live) - min(live)


@given(name=st.sampled_from(NAMES), waves=WAVES, engines=st.integers(1, 5))
def test_no_engine_gets_further_ahead_than_what_it_keeps_and_one_request(
    name: str, waves: list[list[tuple[float, int, int]]], engines: int
) -> None:
    policy, now = create_dispatch(name), loads(*[0.0] * engines)
    for wave in waves:
        kept = [KeptContext(engine=home, num_tokens=tokens) if home < engines else None for _, home, tokens in wave]
        expected = [each for each, _, _ in wave]
        before = [Load(num_requests=load.num_requests, live_tokens=load.live_tokens) for load in now]
        found = route(policy, expected, kept, now, prefill_cost=PREFILL_COST)
        assert [load.live_tokens for load in now] == [load.live_tokens for load in before], (
            "the caller's are not touched"
        )
        assert len(found) == len(wave) and all(0 <= engine < engines for engine in found)
        for engine, tokens in zip(found, expected, strict=True):
            now[engine].live_tokens += tokens
        if name == "least_tokens":
            most = max(own.num_tokens if own else 0 for own in kept)
            assert gap(now) <= max(gap(before), PREFILL_COST * most + max(expected)) + 1e-6


def test_a_turn_stays_where_its_context_is_until_waiting_there_costs_more() -> None:
    own = KeptContext(engine=0, num_tokens=1000)
    wait = PREFILL_COST * own.num_tokens

    def engine(load: float, cost: float) -> int:
        return route(create_dispatch("least_tokens"), [10.0], [own], loads(load, 0.0), prefill_cost=cost)[0]

    assert engine(wait, PREFILL_COST) == 0
    assert engine(wait + 1, PREFILL_COST) == 1
    assert engine(wait, PREFILL_COST / 10) == 1, "a context that is cheap to compute again is not waited for"


def test_sessions_that_share_an_engine_are_spread_again() -> None:
    """A hundred episodes that began on one engine do not all stay there."""
    own = KeptContext(engine=0, num_tokens=200)
    found = route(
        create_dispatch("least_tokens"), [100.0] * 40, [own] * 40, loads(0.0, 0.0, 0.0, 0.0), prefill_cost=PREFILL_COST
    )
    counts = [found.count(engine) for engine in range(4)]
    assert max(counts) - min(counts) <= 2


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 4000)), min_size=1, max_size=30), st.floats(0, 200))
def test_the_late_go_first_and_then_the_shortest(waits: list[tuple[float, int]], patience_s: float) -> None:
    waited_s, num_tokens = waits[first_to_go(waits, patience_s=patience_s)]
    if any(each > patience_s for each, _ in waits):
        assert waited_s == max(each for each, _ in waits)
    else:
        assert num_tokens == min(tokens for _, tokens in waits)


def test_patience_is_what_nearly_all_tools_take() -> None:
    returns = ReturnTimes()
    assert returns.patience_s == math.inf
    for place in range(200):
        returns.observe(0.05 if place % 100 else 9.0)
    assert returns.patience_s == 9.0
    for _ in range(600):
        returns.observe(0.05)
    assert returns.patience_s == 0.05 and FEW < 200


@given(waves=WAVES, engines=st.integers(1, 5), name=st.sampled_from(NAMES))
def test_loads_that_are_followed_give_the_engines_that_read_loads_give(
    waves: list[list[tuple[float, int, int]]], engines: int, name: str
) -> None:
    followed, read = Loads(), loads(*[0.0] * engines)
    for number, load in enumerate(loads(*[0.0] * engines)):
        followed.add(number, load)
    policies = [create_dispatch(name) for _ in range(2)]
    for wave in waves:
        kept = [KeptContext(engine=home, num_tokens=tokens) if home < engines else None for _, home, tokens in wave]
        expected = [each for each, _, _ in wave]
        chosen = [
            route(policy, expected, kept, now, prefill_cost=PREFILL_COST)
            for policy, now in zip(policies, (followed, read), strict=True)
        ]
        assert chosen[0] == chosen[1]
        assert [load.live_tokens for load in followed] == [load.live_tokens for load in read]
        for engine, tokens in zip(chosen[0], expected, strict=True):
            for now in (followed, read):
                now[engine].change(1, tokens)
