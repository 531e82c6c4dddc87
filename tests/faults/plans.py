"""Plans and simulations: impossible ones are refused with the reason and the fix."""

import time
from collections.abc import Callable

from tests.faults.lab import Fault, Lab

REFUSED = {
    "an unknown kind of device": (("plan", "quickstart", "--devices", "8xH101"), "Did you mean 'h100'"),
    "a memory that the device does not have": (
        ("plan", "quickstart", "--devices", "8xH100-40GB"),
        "such as 8xH100-80GB",
    ),
    "a profile without simulators for a robot": (
        ("simulate", "robot-cartpole", "--profile", "qwen2.5-7b-h800"),
        "interlace profile RECIPE",
    ),
    "simulators of processor cores on devices": (
        ("simulate", "robot", "--profile", "rlinf-libero", "schedule=rlinf-embodied-hybrid"),
        "schedule.placement.env=host",
    ),
    "an unknown value of a profile": (
        ("simulate", "longtail", "--profile", "qwen2.5-7b-h800", "profile.lengths.speed=1"),
        "the profile has no such value",
    ),
}


def refuses(arguments: tuple[str, ...], word: str) -> Callable[[Lab], None]:
    def check(lab: Lab) -> None:
        lab.cli(*arguments).refused(word)

    return check


def a_search_that_would_last(lab: Lab) -> None:
    """A search of some seconds for 512 devices ends in time, with its best schedule if it has simulated one."""
    start_s = time.monotonic()
    command = ("plan", "longtail", "--profile", "qwen2.5-7b-h20", "--devices", "512", "plan.search_s=5")
    ended = lab.cli(*command)
    assert ended.code == 0 or "Give more time with plan.search_s" in " ".join(ended.text.split()), ended.text[-600:]
    assert time.monotonic() - start_s < 180, "the search did not stop"


FAULTS = [
    *(Fault(name=name, check=refuses(*case)) for name, case in REFUSED.items()),
    Fault(name="a search that would last for minutes", check=a_search_that_would_last),
]
