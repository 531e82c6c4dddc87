"""Dispatch policies use the live load, start the longest first, and separate the tail."""

import random
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.decode_costs import DecodeCosts
from interlace.core.errors import UserError
from interlace.schedule.dispatch import DispatchPolicy, Load, create_dispatch
from interlace.schedule.dispatch.least_tokens import least_loaded
from interlace.schedule.lengths import LengthHistory
from interlace.schedule.loads import Loads

NAMES = ("round_robin", "least_tokens", "longest_first", "skew_aware")


def loads(*tokens: float) -> list[Load]:
    return [Load(num_requests=0, live_tokens=each) for each in tokens]


@pytest.mark.parametrize("name", NAMES)
@given(lengths=st.lists(st.floats(1, 1e4), max_size=60), engines=st.integers(1, 7))
def test_every_request_gets_an_engine_that_is_there(name: str, lengths: list[float], engines: int) -> None:
    found = create_dispatch(name).assign(lengths, loads(*[0.0] * engines))
    assert len(found) == len(lengths) and all(0 <= engine < engines for engine in found)


def test_round_robin_goes_on_where_it_stopped() -> None:
    policy = create_dispatch("round_robin")
    assert policy.assign([1, 1], loads(0, 0, 0)) == [0, 1]
    assert policy.assign([1, 1], loads(0, 0, 0)) == [2, 0]


def test_least_tokens_looks_at_live_load() -> None:
    assert create_dispatch("least_tokens").assign([10, 10, 10], loads(25, 0, 8)) == [1, 2, 1]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=40), st.integers(2, 5))
def test_longest_first_is_within_four_thirds_of_any_bound(lengths: list[float], engines: int) -> None:
    found = create_dispatch("longest_first").assign(lengths, loads(*[0.0] * engines))
    totals = [sum(length for length, engine in zip(lengths, found, strict=True) if engine == e) for e in range(engines)]
    # Graham's bound against the best makespan, which is at least the mean and the longest; with a second job beside
    # the longest the bound holds against their sum too.
    ordered = sorted(lengths, reverse=True)
    beside = sum(ordered[engines - 1 : engines + 1]) if len(ordered) > engines else 0.0
    best = max(sum(lengths) / engines, ordered[0], beside)
    assert max(totals) <= 4 / 3 * best + 1e-6


SKEWED = [4000.0] * 750 + [8000.0] * 250


STEEP = DecodeCosts(steps=((1.0, 0.01), (100.0, 0.03)))
FLAT = DecodeCosts(steps=((1.0, 0.01), (1000.0, 0.01)))


def long_engines(costs: DecodeCosts | None, lengths: list[float]) -> set[int]:
    """Returns the engines with the longest requests; none if every engine has some."""
    policy = create_dispatch("skew_aware")
    if costs:
        policy.learn(costs)
    found = policy.assign(lengths, loads(*[0.0] * 8))
    longest = {engine for engine, each in zip(found, lengths, strict=True) if each == max(lengths)}
    return longest if len(longest) < 8 and len(set(found)) == 8 else set()


def test_skew_aware_gives_the_longest_requests_separate_engines_with_few_requests_each() -> None:
    policy = create_dispatch("skew_aware")
    policy.learn(STEEP)
    found = policy.assign(SKEWED, loads(*[0.0] * 8))
    counts = [found.count(engine) for engine in range(8)]
    long = long_engines(STEEP, SKEWED)
    assert long
    short = set(range(8)) - long
    assert max(counts[engine] for engine in long) < min(counts[engine] for engine in short)


def test_skew_aware_splits_only_if_the_wave_then_ends_sooner() -> None:
    assert long_engines(STEEP, SKEWED)
    assert not long_engines(None, SKEWED), "nothing was measured"
    assert not long_engines(FLAT, SKEWED), "a step that takes as long for many sequences delays no long response"
    assert not long_engines(STEEP, [5000.0] * 1000), "equal predictions have no tail"
    assert not long_engines(STEEP, [5000.0] * 7), "fewer requests than engines need no sets"


def test_skew_aware_does_not_crowd_long_contexts_where_reading_them_is_the_cost() -> None:
    reading = DecodeCosts(steps=FLAT.steps, context_token_s=1e-6)
    assert not long_engines(reading, SKEWED)


def test_a_users_own_policy_is_checked() -> None:
    assert isinstance(create_dispatch("interlace.schedule.dispatch.least_tokens:LeastTokens"), DispatchPolicy)
    with pytest.raises(UserError, match="not a DispatchPolicy"):
        create_dispatch("collections:Counter")
    with pytest.raises(UserError, match=r"Unfinished.* is called without arguments, which fails: .*assign"):
        create_dispatch(f"{__name__}:Unfinished")
    with pytest.raises(UserError, match="Did you mean 'round_robin'"):
        create_dispatch("roundrobin")


class Unfinished(DispatchPolicy):
    """Assigns nothing."""


class Astray(DispatchPolicy):
    """Answers what it was made to."""

    answer: ClassVar[object] = None

    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        return self.answer  # type: ignore[return-value]  # on purpose


@pytest.mark.parametrize("answer", [None, [0], [0, 1, 2], [0, -1], [0, "1"], "01"])
def test_an_answer_that_is_none_names_the_policy(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    policy = create_dispatch(f"{__name__}:Astray")
    monkeypatch.setattr(Astray, "answer", answer)
    with pytest.raises(UserError, match=r"Astray.*for 2 requests and 2 engines"):
        policy.assign([1.0, 1.0], loads(0, 0))


def test_lengths_are_expected_from_the_prompt_s_history_else_in_proportion_to_its_length() -> None:
    history = LengthHistory(first_guess=50.0)
    assert history.expect("a", 10) == 50.0
    history.observe("a", 10, 100)
    history.observe("a", 10, 300)
    assert history.expect("a", 10) == 200.0
    assert history.expect("new", 20) == 400.0


@given(st.integers(0, 2**32))
def test_indexed_loads_choose_as_a_look_at_all_engines_does(seed: int) -> None:
    chance = random.Random(seed)
    every, index = [Load(num_requests=0, live_tokens=0.0) for _ in range(6)], Loads()
    here: list[int] = []
    for _ in range(30):
        number = chance.randrange(len(every))
        if number in here and chance.random() < 0.3:
            here.remove(number)
            index.remove(number)
        elif number not in here:
            here = sorted([*here, number])
            index.add(number, every[number])
        every[number].change(1, chance.choice((1.0, 2.0, -1.0)))
        if not here:
            continue
        expected = [chance.choice((1.0, 2.0)) for _ in range(chance.randrange(1, 5))]
        order, engines = range(len(expected)), range(len(here))
        chosen = least_loaded(order, engines, expected, index)
        assert chosen == least_loaded(order, engines, expected, [every[number] for number in here])
        for place, tokens in zip(chosen, expected, strict=True):
            every[here[place]].change(1, tokens)
