"""Refills, empty places and rounds are pure arithmetic of steps, without channels, clocks or samples."""

import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.types import Prompt
from interlace.schedule.rounds import Rounds
from interlace.schedule.schedule import Oversample, Schedule, TailBatching
from interlace.schedule.staleness import Batcher, Gate
from interlace.schedule.steps import Steps

PROMPTS, STEPS = 3, 4


class Run:
    """Steps under random events, and what a step got."""

    def __init__(self, *, max_refills: int, staleness: float, batching: str) -> None:
        schedule = Schedule.parse({"max_staleness": staleness, "batching": batching})
        self.gate = Gate(schedule, prompts_per_step=PROMPTS, num_steps=STEPS)
        self.batcher = Batcher(self.gate, schedule.batching)
        self.steps = Steps(self.gate, self.batcher, max_refills=max_refills)
        self.running: list[int] = []
        self.admitted: Counter[int] = Counter()
        """Groups ever admitted for a step, its refills included."""
        self.places: list[tuple[int, int]] = [(0, 0)]
        """(groups, empty places) that each step has taken so far."""

    def pump(self) -> None:
        while self.gate.room > 0:
            ticket = self.steps.admit()
            assert ticket.gid == sum(self.admitted.values()), "groups are numbered in order of admission"
            self.admitted[ticket.step] += 1
            self.running.append(ticket.gid)

    def ready(self, place: int) -> None:
        ticket = self.steps.ticket(self.running.pop(place))
        assert ticket
        self.batcher.ready(ticket)

    def take(self) -> None:
        groups, empty = self.places[-1]
        taken = self.steps.take(PROMPTS - groups - empty, len(self.places) - 1)
        self.places[-1] = groups + len(taken.tickets), empty + taken.num_empty
        if sum(self.places[-1]) == PROMPTS:
            self.gate.publish()
            self.places.append((0, 0))
            self.take()  # of the next step some may have finished before

    def check(self) -> None:
        held = self.steps.live_gids()
        assert held == sorted(held) and all(self.steps.ticket(gid) for gid in held)
        assert held == sorted(gid for step in range(STEPS) for gid in self.steps.pending(step))
        assert self.gate.consumed == sum(map(sum, self.places)), "an empty place is consumed like a group"
        outstanding = self.gate.admitted - self.gate.returned - self.gate.consumed
        assert outstanding >= len(held), "each live group keeps its slot"


@given(
    st.integers(0, 2), st.sampled_from([0.0, 1.0, 1.5]), st.sampled_from(["step", "arrival"]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=60),
)  # fmt: skip
def test_every_step_gets_its_places_whatever_is_dropped(
    max_refills: int, staleness: float, batching: str, events: list[tuple[bool, int]]
) -> None:
    run = Run(max_refills=max_refills, staleness=staleness, batching=batching)
    run.pump()
    for is_dropped, number in events:
        if not run.running:
            break
        if is_dropped:
            run.steps.replace(run.running.pop(number % len(run.running)))
        else:
            run.ready(number % len(run.running))
        run.take()
        run.pump()
        run.check()
    while run.running:
        run.ready(0)
        run.take()
        run.pump()
        run.check()
    assert run.places == [*run.places[:STEPS], (0, 0)] and all(sum(step) == PROMPTS for step in run.places[:STEPS])
    if batching == "step":  # else a group may go to another step than its own
        for step in range(STEPS):
            groups, empty = run.places[step]
            assert run.admitted[step] <= PROMPTS + max_refills
            assert not empty or run.admitted[step] == PROMPTS + max_refills, "empty while refills are left"
            assert groups + empty == PROMPTS


def test_a_refill_inherits_the_earliest_vacant_step() -> None:
    run = Run(max_refills=9, staleness=2.0, batching="step")
    run.pump()
    for gid in (4, 1):
        run.steps.replace(gid)
    assert [run.steps.admit().step for _ in range(2)] == [0, 1]


def test_an_empty_place_keeps_its_deadline_and_is_taken_as_nothing() -> None:
    run = Run(max_refills=0, staleness=0.0, batching="step")
    run.pump()
    run.steps.replace(0)
    assert run.gate.room == 0 and run.steps.ticket(0) is None and run.batcher.num_outstanding(0) == PROMPTS
    assert run.steps.take(PROMPTS, 0).num_empty == 1


def test_a_resumed_run_keeps_empty_places_and_used_refills() -> None:
    """Its steps had more groups than those of the uninterrupted run, and drew their refills again."""
    whole = Run(max_refills=1, staleness=1.0, batching="step")
    whole.pump()
    whole.steps.replace(0)
    whole.steps.replace(whole.steps.admit().gid)
    places = whole.steps.list_places()
    assert places and places.empty == (0,)
    resumed = Run(max_refills=1, staleness=1.0, batching="step")
    resumed.gate.restore(whole.gate.admitted)
    resumed.steps.restore(places)
    tickets = [resumed.steps.readmit(gid) for gid in whole.steps.live_gids()]
    assert [ticket.step for ticket in tickets] == [0, 0, 1, 1, 1] and resumed.gate.room == whole.gate.room == 0
    for ticket in tickets[:2]:
        resumed.batcher.ready(ticket)
    taken = resumed.steps.take(PROMPTS, 0)
    assert ([ticket.gid for ticket in taken.tickets], taken.num_empty) == ([1, 2], 1)
    assert not resumed.steps.use_refill(0) and resumed.steps.use_refill(1)


class Numbers:
    """Prompts 0, 1, 2 ... up to a number."""

    def __init__(self, total: int) -> None:
        self._left = [prompt(number) for number in range(total)]

    @property
    def exhausted(self) -> bool:
        return not self._left

    def __next__(self) -> Prompt:
        return self._left.pop(0)

    def hand_back(self, prompts: Iterable[Prompt]) -> None:
        self._left = [*prompts, *self._left]


def prompt(number: int) -> Prompt:
    return Prompt(uid=str(number), token_ids=np.zeros(1, np.int32), text="", answer="")


@pytest.mark.parametrize(
    "tail", [Oversample(prompts=2, responses=1.5), TailBatching(prompts=1.5, responses=1.5, max_age=2)]
)
@pytest.mark.parametrize("seed", range(5))
def test_rounds_lose_no_prompt_and_accept_as_many_as_a_step_needs(tail: Oversample | TailBatching, seed: int) -> None:
    rng, rounds = random.Random(seed), Rounds(tail, Numbers(30), prompts_per_step=4, samples_per_prompt=2)
    accepted: list[str] = []
    next_gid = 0
    while not rounds.exhausted:
        launched = dict(enumerate(rounds.begin(), start=next_gid))
        next_gid += len(launched)
        events = [gid for gid, launch in launched.items() for _ in range(launch.num_samples)]
        rng.shuffle(events)
        for gid in events:
            if rounds.is_full:
                break
            rounds.generated(gid)
        taken = [gid for gid in launched if rounds.is_accepted(gid)]
        assert len(taken) == min(4, len(launched)) and rounds.is_full == (len(taken) == 4)
        accepted += [launched[gid].prompt.uid for gid in taken]
        for gid, launch in launched.items():
            if gid not in taken:
                rounds.keep_for_later_round(launch.prompt)
        rounds.end()
    assert sorted(accepted, key=int) == [str(number) for number in range(30)]
