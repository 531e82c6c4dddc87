"""Expected interruptions of a planned run, and the share of its time that remains for training."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.forecast.costs.markets import Market
from interlace.run.chaos.faults import TRAINED
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.run.recipe.layout import find_needed_roles
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """Means of a run on a market."""

    per_day: float
    """Interruptions of all nodes."""
    restarts_per_day: float
    """Interruptions of nodes with a part of a trained model, after each of which the run starts again."""
    restart_loss_s: float
    """Seconds lost by each of them: the start, and half of the time between two checkpoints."""
    effective_time: float
    """Share of the time that trains new steps, 0 to 1."""


def expect_interruptions(
    market: Market, recipe: Recipe, schedule: Schedule, devices: Sequence[Device], step_s: float
) -> Interruptions:
    """Returns the means of a run under a schedule. step_s: seconds of a step without interruptions.

    If a node with a trainer ends, the run starts again from its newest checkpoint on disk: the one in memory ends with
    the node. If another node ends, its engines are missing for `restart_s`, and others generate their samples again
    from the beginning. By Little's law a sample is in flight for as many steps as the gate admits, half of them before
    the interruption. The loss is counted as if generation limited the step.
    """
    cluster = tuple(devices)
    needed = {role.name for role in find_needed_roles(algorithm_of(recipe).needs)}
    trained = {
        device.index // market.node_devices
        for role in TRAINED
        if role in needed
        for instance in schedule.instances(role, cluster)
        for device in instance
    }
    engines = [device for instance in schedule.instances("rollout", cluster) for device in instance]
    apart = sum(device.index // market.node_devices not in trained for device in engines) / max(1, len(engines))
    num_nodes = -(-len(cluster) // market.node_devices)
    every = min(recipe.checkpoint_every or recipe.steps, recipe.steps)
    loss_s = market.restart_s + every * step_s / 2
    again_s = (1 + schedule.depth) * schedule.sync_every * step_s / 2
    lost = market.per_node_s * (len(trained) * loss_s + apart * (market.restart_s + again_s))
    per_day = market.interruptions_per_node_day
    return Interruptions(
        per_day=num_nodes * per_day,
        restarts_per_day=len(trained) * per_day,
        restart_loss_s=loss_s,
        effective_time=1 / (1 + lost),
    )
