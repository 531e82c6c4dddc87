"""Plans and simulations: impossible ones are refused with the reason and the fix."""

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


FAULTS = [Fault(name=name, check=refuses(*case)) for name, case in REFUSED.items()]
