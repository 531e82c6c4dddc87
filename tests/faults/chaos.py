"""Faults in a run's processes, and specifications of faults that cannot happen."""

from collections.abc import Callable

from tests.faults.lab import Fault, Lab


def refused(specification: str, *sentences: str) -> Callable[[Lab], None]:
    return lambda lab: lab.cli("chaos", "quickstart", "--faults", specification).refused(*sentences)


def scorers_are_killed(lab: Lab) -> None:
    settings = (*lab.small, "reward.workers=2", "steps=3", "warmup=null")
    ended = lab.cli("chaos", "quickstart", *settings, "--faults", "kill:reward@1/step")
    ended.said(0, "0 lost, 0 duplicated", "final weights: equal", "certificate: holds")


def restart_budget_is_exhausted(lab: Lab) -> None:
    settings = (*lab.small, "reward.workers=1", "steps=12", "warmup=null", "recovery.restarts_per_hour={reward: 1}")
    ended = lab.cli("chaos", "quickstart", *settings, "--faults", "kill:reward@1/step")
    ended.said(1, "processes of the role 'reward' ended 2 times within an hour", "(cause: resource)")


def checkpoint_is_restored(lab: Lab) -> None:
    lab.cli("doctor", "--checkpoint", str(lab.run)).said(0, "step_4: model of", "step_4: optimizer of")


def damaged_checkpoint_is_named(lab: Lab) -> None:
    weights = lab.newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    lab.cli("doctor", "--checkpoint", str(lab.run)).said(1, "FAIL", "step_4")


FAULTS = [
    Fault(name="scoring processes are killed in each step", check=scorers_are_killed),
    Fault(name="scoring processes end more often than the budget allows", check=restart_budget_is_exhausted),
    Fault(name="a fault of an unknown role", check=refused("kill:rolout@1s", "unknown role 'rolout'")),
    Fault(name="a fault of an unknown kind", check=refused("crash:reward@1s", "unknown kind 'crash'")),
    Fault(name="a fault with a rate above 1", check=refused("kill:reward@2/step", "above 0 and at most 1")),
    Fault(name="a fault of a role without a process", check=refused("kill:reward@1s", "Set reward.workers=1")),
    Fault(name="doctor restores a checkpoint", check=checkpoint_is_restored),
    Fault(name="doctor names a damaged checkpoint", check=damaged_checkpoint_is_named),
]
