"""The rules of the gate and the batcher, each with a test that fails without it."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.schedule.schedule import Schedule
from interlace.schedule.staleness import Batcher, Gate, Ticket


def gate(**fields: object) -> Gate:
    return Gate(Schedule.parse(fields), prompts_per_step=4, num_steps=100)


def admit(gate: Gate, batcher: Batcher, gid: int, step: int = 0) -> Ticket:
    ticket = Ticket(gid=gid, step=step, deadline=gate.deadline)
    gate.admitted += 1
    batcher.admit(ticket)
    return ticket


@pytest.mark.parametrize(("staleness", "depth", "room"), [(0, None, 4), (1, None, 8), (0.5, None, 6), (2, 0.5, 6)])
def test_generation_runs_ahead_by_the_pipeline_depth(staleness: float, depth: float | None, room: int) -> None:
    assert gate(max_staleness=staleness, pipeline_depth=depth).room == room


def test_slots_come_back_at_publication_not_at_consumption() -> None:
    it = gate()
    it.admitted += 4
    it.consumed += 4
    assert it.room == 0
    it.publish()
    assert it.room == 4


def test_a_dropped_group_gives_its_slot_back_at_once() -> None:
    it = gate()
    it.admitted += 4
    it.returned += 1
    assert it.room == 1


def test_the_run_s_total_caps_admission() -> None:
    it = Gate(Schedule(max_staleness=3), prompts_per_step=4, num_steps=2)
    assert it.room == 8


def test_a_resumed_gate_admits_what_an_uninterrupted_one_would() -> None:
    schedule = Schedule(max_staleness=1, sync_every=2)
    whole = Gate(schedule, prompts_per_step=4, num_steps=10)
    for step in range(3):
        whole.admitted += 4
        whole.consumed += 4
        if (step + 1) % 2 == 0:
            whole.publish()
    resumed = Gate(schedule, prompts_per_step=4, num_steps=10, done_steps=3)
    assert (resumed.room, resumed.version, resumed.deadline) == (whole.room, whole.version, whole.deadline)


def test_a_group_due_now_holds_back_those_that_are_not() -> None:
    it = gate(max_staleness=1)
    batcher = Batcher(it, "arrival")
    old = [admit(it, batcher, gid) for gid in range(4)]  # deadline 1
    it.publish()
    young = [admit(it, batcher, gid) for gid in range(4, 8)]  # deadline 2
    for ticket in young:
        batcher.ready(ticket)
    # Version 1 has four slots, and all four old groups are due in it: none is left for the young.
    assert batcher.take(4, 0) == []
    assert batcher.urgent() == 1
    for ticket in old:
        batcher.ready(ticket)
    assert batcher.take(4, 0) == old


def test_arrival_takes_the_first_that_finished() -> None:
    it = gate(max_staleness=1)
    batcher = Batcher(it, "arrival")
    tickets = [admit(it, batcher, gid) for gid in range(8)]
    for place in (5, 2, 7, 0, 1):
        batcher.ready(tickets[place])
    assert [ticket.gid for ticket in batcher.take(4, 0)] == [5, 2, 7, 0]


def test_a_group_overtakes_older_ones_only_within_the_window() -> None:
    it = gate(max_staleness=1, batching="arrival", overtake=0.4)
    assert it.window == 3, "of the eight that may be admitted"
    batcher = Batcher(it, "arrival")
    tickets = [admit(it, batcher, gid) for gid in range(8)]
    for place in (7, 1, 3, 2, 4):
        batcher.ready(tickets[place])
    assert [ticket.gid for ticket in batcher.take(4, 0)] == [1, 2], "the window is 0, 1, 2: those taken stay in it"
    assert batcher.num_ready == 0, "what is beyond waits for 0, not for a deadline"
    batcher.ready(tickets[0])
    assert [ticket.gid for ticket in batcher.take(4, 0)] == [0, 3], "it begins at 3 once 0 to 2 are gone"
    it.publish()
    assert [ticket.gid for ticket in batcher.take(4, 1)] == [4, 7]


def test_a_dropped_group_takes_no_place_of_the_window() -> None:
    it = gate(max_staleness=1, batching="arrival", overtake=0.25)
    batcher = Batcher(it, "arrival")
    tickets = [admit(it, batcher, gid) for gid in range(8)]
    batcher.ready(tickets[2])
    assert batcher.take(4, 0) == []
    batcher.drop(tickets[1])
    assert batcher.take(4, 0) == [tickets[2]]


def test_step_batching_takes_its_own_step_only() -> None:
    it = gate(max_staleness=1)
    batcher = Batcher(it, "step")
    later, now = admit(it, batcher, 0, step=1), admit(it, batcher, 1, step=0)
    batcher.ready(later)
    assert batcher.take(4, 0) == []
    batcher.ready(now)
    assert batcher.take(4, 0) == [now]
    assert batcher.num_outstanding(0) == 0 and batcher.num_outstanding(1) == 1


@given(
    staleness=st.sampled_from([0, 0.5, 1, 2, 3]),
    sync_every=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
    drops=st.floats(0, 0.4),
)
def test_no_group_is_ever_taken_after_its_deadline(staleness: float, sync_every: int, order, drops: float) -> None:  # type: ignore[no-untyped-def]
    """Groups finish in any order, some die; the trainer takes what it may and waits for the rest."""
    schedule = Schedule(max_staleness=staleness, sync_every=sync_every, batching="arrival")
    it = Gate(schedule, prompts_per_step=3, num_steps=12)
    batcher = Batcher(it, "arrival")
    running: list[Ticket] = []
    gid = 0
    for step in range(12):
        taken = 0
        while taken < 3:
            while it.room > 0:
                running.append(admit(it, batcher, gid))
                gid += 1
            got = batcher.take(3 - taken, step)
            assert all(ticket.deadline >= it.version for ticket in got)
            taken += len(got)
            if not got:
                assert running, "the trainer waits, and nothing runs"
                ticket = running.pop(order.randrange(len(running)))
                if order.random() < drops:
                    batcher.drop(ticket)
                    it.returned += 1
                else:
                    batcher.ready(ticket)
        if (step + 1) % sync_every == 0:
            it.publish()


@given(
    overtake=st.sampled_from([0, 0.1, 0.3, 0.5, 1]),
    staleness=st.sampled_from([0, 1, 2, 3]),
    order=st.randoms(use_true_random=False),
    drops=st.floats(0, 0.4),
)
def test_no_group_is_overtaken_by_more_than_the_window(overtake: float, staleness: int, order, drops: float) -> None:  # type: ignore[no-untyped-def]
    """Groups finish in any order, some die: few younger ones go before any, none is late, and training never stops."""
    schedule = Schedule(max_staleness=staleness, batching="arrival", overtake=overtake)
    it = Gate(schedule, prompts_per_step=3, num_steps=12)
    assert it.window == max(1, math.floor(overtake * 3 * (1 + staleness) + 1e-9))
    batcher = Batcher(it, "arrival")
    running: list[Ticket] = []
    gone: list[int] = []
    gid = 0
    for step in range(12):
        while len(gone) < 3 * (step + 1):
            while it.room > 0:
                running.append(admit(it, batcher, gid))
                gid += 1
            got = batcher.take(3 * (step + 1) - len(gone), step)
            for ticket in got:
                assert ticket.deadline >= it.version
                assert sum(other > ticket.gid for other in gone) <= it.window - 1
                gone.append(ticket.gid)
            if not got:
                assert running, "the trainer waits, and nothing runs"
                ticket = running.pop(order.randrange(len(running)))
                if order.random() < drops:
                    batcher.drop(ticket)
                    it.returned += 1
                else:
                    batcher.ready(ticket)
        it.publish()


def test_a_depth_beyond_the_bound_is_refused() -> None:
    with pytest.raises(UserError, match="pipeline_depth"):
        Schedule.parse({"max_staleness": 1, "pipeline_depth": 2})


@pytest.mark.parametrize(("batching", "overtake"), [("step", None), ("arrival", None), ("arrival", 0.3)])
def test_the_books_hold_what_is_live_and_no_more(batching: Literal["step", "arrival"], overtake: float | None) -> None:
    it = gate(max_staleness=1, batching=batching, overtake=overtake)
    batcher = Batcher(it, batching)
    for step in range(20):
        for place in range(4):
            batcher.ready(admit(it, batcher, 4 * step + place, step))
        assert len(batcher.take(4, step)) == 4
        it.publish()
    assert not any(vars(batcher)[books] for books in ("_ready", "_beyond", "_outstanding", "_of_step"))
    assert not any(vars(batcher._window)[books] for books in ("_places", "_taken"))
