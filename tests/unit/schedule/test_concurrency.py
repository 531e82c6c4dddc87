"""A limit that follows the use of an engine's KV cache."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.core.types import SampleKey
from interlace.schedule.concurrency import Adaptive, AdaptiveLimit, EngineUse, EpisodeLimit, create_limit
from interlace.schedule.schedule import Schedule

USES = st.lists(
    st.builds(
        EngineUse,
        num_here=st.integers(0, 200),
        num_waiting=st.integers(0, 3),
        num_finished=st.integers(0, 100),
        kv_use=st.floats(0, 1),
        num_preemptions=st.sampled_from([0, 0, 0, 1, 5]),
        is_binding=st.booleans(),
    ),
    max_size=40,
)
SETTINGS = Adaptive(initial=16, floor=2, ceiling=64)


def use(
    *,
    here: int = 16,
    finished: int = 0,
    kv: float = 0.5,
    preempted: int = 0,
    waiting: int = 0,
    binding: bool = True,
    tokens: int = 0,
    ended: int = 0,
) -> EngineUse:
    return EngineUse(
        num_here=here,
        num_waiting=waiting,
        num_finished=finished,
        kv_use=kv,
        num_preemptions=preempted,
        is_binding=binding,
        num_tokens=tokens,
        num_ended_tokens=ended,
    )


def after(*uses: EngineUse) -> float:
    limit = AdaptiveLimit(SETTINGS)
    for each in uses:
        limit.observe(each)
    return limit.value


@given(USES)
def test_it_stays_between_floor_and_ceiling_and_depends_on_what_was_seen_alone(uses: list[EngineUse]) -> None:
    assert 2 <= after(*uses) <= 64
    assert after(*uses) == after(*uses)


@given(USES, st.integers(0, 200), st.floats(0, 1))
def test_a_preemption_never_raises_it_and_a_full_cache_never_does(uses: list[EngineUse], here: int, kv: float) -> None:
    before = after(*uses)
    assert after(*uses, use(here=here, kv=kv, preempted=1, finished=1000)) <= before
    assert after(*uses, use(here=here, kv=max(kv, SETTINGS.low), finished=1000)) <= before


def test_it_grows_by_a_quarter_once_as_many_have_finished_as_it_lets_in() -> None:
    assert after(use(finished=15)) == 16
    assert after(use(finished=15), use(finished=1)) == 20
    assert after(use(finished=16), use(finished=19)) == 20
    assert after(use(finished=16), use(finished=20)) == 25


@pytest.mark.parametrize("held", [{"binding": False}, {"waiting": 1}, {"kv": 0.6}])
def test_it_does_not_grow_where_that_would_change_nothing_or_too_much(held: dict[str, float]) -> None:
    assert after(use(finished=100, **held)) == 16  # type: ignore[arg-type]


def test_above_the_high_mark_it_is_trimmed_to_what_would_hold_the_target() -> None:
    assert after(use(here=16, kv=0.9)) == math.floor(16 * 0.7 / 0.9)


def test_preemptions_cut_once_until_the_engine_has_come_down() -> None:
    cut = use(here=16, preempted=3)
    assert after(cut) == 12
    assert after(cut, use(here=15, preempted=1), use(here=13, preempted=2)) == 12, "still on its way down"
    assert after(cut, use(here=12), use(here=12, preempted=1)) == 9


def test_it_finds_what_a_cache_holds() -> None:
    """An engine of 1,000 cells whose sequences grow by a cell a call to lengths of 1 to 40: some 70 fill it."""
    rng, limit = random.Random(0), AdaptiveLimit(SETTINGS)
    running: list[tuple[int, int]] = []
    limits, num_lost = [], 0
    for call in range(4000):
        running += [(0, rng.randint(1, 40)) for _ in range(int(limit.value) - len(running))]
        running = [(held + 1, length) for held, length in running]
        alive = [(held, length) for held, length in running if held < length]
        kept = list(alive)
        while sum(held for held, _ in kept) > 1000:
            kept.remove(min(kept))
        kv = min(1.0, sum(held for held, _ in alive) / 1000)
        lost = len(alive) - len(kept)
        limit.observe(use(here=len(kept), finished=len(running) - len(alive), kv=kv, preempted=lost))
        running = kept
        if call >= 1000:
            limits.append(limit.value)
            num_lost += lost
    assert 45 <= sum(limits) / len(limits) <= 60, "six to eight tenths of the cache"
    assert num_lost < 10, "of some 8,000"


A, B, C, D = (SampleKey(gid, 0) for gid in range(4))


def test_whole_episodes_are_admitted_while_their_contexts_fit_between_turns_too() -> None:
    limit = create_limit(Schedule.parse({"concurrency": {"kind": "episodes", "share": 0.8}}).concurrency)
    assert isinstance(limit, EpisodeLimit)
    assert limit.value == 16, "until the engine has reported"
    limit.observe(use(kv=0.5, waiting=1, tokens=900))
    assert limit.value == 16, "waiting sequences hold no part of the cache"
    limit.observe(use(kv=0.5, tokens=500))
    limit.observe(use(kv=1.0, tokens=0, ended=1400))
    assert limit.value == math.inf and limit.admits(A, 800, 0) and not limit.admits(A, 801, 0)
    for owner, num_tokens in ((A, 300), (B, 100), (C, 200)):
        limit.keep(owner, num_tokens)
    assert not limit.admits(D, 201, 0) and limit.admits(D, 100, 100)
    assert limit.admits(A, 300, 900), "a sample that is here"
    assert limit.pause(400) == []
    assert limit.expect(B) and not limit.expect(D)
    assert limit.pause(450) == [C], "the smallest whose next turn is not queued"
    assert not limit.expect(C)
    limit.drop(A)
    assert limit.admits(D, 700, 0) and not limit.admits(D, 701, 0), "B alone is left"


def test_a_number_is_a_number_and_none_is_no_limit() -> None:
    assert create_limit(Schedule().concurrency).value == math.inf
    assert create_limit(Schedule.parse({"concurrency": 3}).concurrency).value == 3
    assert create_limit(Schedule.parse({"concurrency": "adaptive"}).concurrency).value == 16
    chosen = Schedule.parse({"concurrency": {"kind": "adaptive", "initial": 4, "ceiling": 8}})
    assert create_limit(chosen.concurrency).value == 4


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"kind": "adaptive", "initial": 2, "floor": 4}, "must not decrease"),
        ({"kind": "adaptive", "low": 0.9}, "must not decrease"),
        (0, "it must be 1 or more"),
        ("adaptiv", "adaptive"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(setting: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Schedule.parse({"concurrency": setting})
