"""Device grants are all or none, downstream first, and waiting claims reserve devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.schedule.arbiter import Arbiter, Claim


def claim(owner: str, *devices: int, stage: int = 0, preemptible: bool = False) -> Claim:
    return Claim(owner=owner, devices=devices, stage=stage, preemptible=preemptible)


def granted(arbiter: Arbiter) -> list[str]:
    return [each.owner for each in arbiter.decide().granted]


def test_all_devices_or_none() -> None:
    arbiter = Arbiter(2, "when_idle")
    small, wide = claim("small", 0), claim("wide", 0, 1)
    arbiter.request(small)
    assert granted(arbiter) == ["small"]
    arbiter.request(wide)
    assert granted(arbiter) == []
    assert arbiter.holder(1) is None
    arbiter.release(small)
    assert granted(arbiter) == ["wide"]


def test_the_most_downstream_goes_first_then_first_come() -> None:
    arbiter = Arbiter(1, "when_idle")
    first = claim("first", 0)
    arbiter.request(first)
    arbiter.decide()
    for each in (claim("a", 0, stage=1), claim("b", 0, stage=2), claim("c", 0, stage=2)):
        arbiter.request(each)
    assert [each.owner for each in arbiter.waiting()] == ["b", "c", "a"]


def test_a_waiting_claim_reserves_its_devices() -> None:
    arbiter = Arbiter(2, "when_idle")
    holder = claim("holder", 0)
    arbiter.request(holder)
    arbiter.decide()
    arbiter.request(claim("wide", 0, 1, stage=2))
    arbiter.request(claim("narrow", 1, stage=1))
    assert granted(arbiter) == [], "or the wide one would starve"
    arbiter.release(holder)
    assert granted(arbiter) == ["wide"]


@pytest.mark.parametrize(("switch", "yields"), [("when_ready", ("rollout",)), ("when_idle", ())])
def test_only_rollout_is_asked_to_yield_and_only_when_ready(switch: str, yields: tuple[str, ...]) -> None:
    arbiter = Arbiter(1, switch)  # type: ignore[arg-type]
    arbiter.request(claim("rollout", 0, stage=0, preemptible=True))
    arbiter.decide()
    arbiter.request(claim("actor", 0, stage=4))
    assert arbiter.decide().yields == yields


def test_nobody_releases_what_another_holds() -> None:
    arbiter = Arbiter(1, "when_idle")
    with pytest.raises(ValueError, match="does not hold"):
        arbiter.release(claim("a", 0))


@given(st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 3)), max_size=12), st.randoms())
def test_every_claim_is_granted_in_the_end(wanted, order) -> None:  # type: ignore[no-untyped-def]
    arbiter = Arbiter(4, "when_idle")
    for number, (devices, stage) in enumerate(wanted):
        arbiter.request(claim(str(number), *sorted(devices), stage=stage))
    holding = list(arbiter.decide().granted)
    seen = [each.owner for each in holding]
    while holding:
        devices = [device for each in holding for device in each.devices]
        assert len(devices) == len(set(devices)), "two hold one device"
        arbiter.release(holding.pop(order.randrange(len(holding))))
        more = arbiter.decide().granted
        holding += more
        seen += [each.owner for each in more]
    assert sorted(seen) == sorted(str(number) for number in range(len(wanted)))


def test_each_waiting_claim_asks_a_holder_once() -> None:
    arbiter = Arbiter(3, "when_ready")
    for device in range(3):
        arbiter.request(claim(f"rollout/{device}", device, preemptible=True))
    arbiter.decide()
    arbiter.request(claim("reference", 0, stage=2))
    assert arbiter.decide().yields == ("rollout/0",)
    arbiter.request(claim("actor", 0, 1, stage=4))
    assert arbiter.decide().yields == ("rollout/0", "rollout/1"), "the actor is served first, so it asks as well"
    assert arbiter.decide().yields == ()
