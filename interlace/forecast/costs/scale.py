"""Smaller model of a large cluster with the same work per device, so that a step takes about as long."""

import math
from typing import TypeVar

from interlace.forecast.profile.types import EnvCosts, InferenceCosts, Profile, TrainCosts

C = TypeVar("C", bound=InferenceCosts)


def scale_model(profile: Profile, factor: int, num_devices: int) -> Profile:
    """Returns the costs of a model with `num_devices / factor` devices and the same share of the prompts.

    The model has fewer engines with the same number of sequences each. An instance that spans many devices takes the
    same time: its work is divided by the factor, and so is the speed of its devices.
    """
    if factor == 1:
        return profile
    rewards = profile.reward
    return profile.model_copy(
        update={
            "actor": _scale_training(profile.actor, factor, num_devices),
            "critic": profile.critic and _scale_training(profile.critic, factor, num_devices),
            "env": profile.env and _simulators(profile.env, factor),
            "reward": rewards.model_copy(update={"workers": max(1, round(rewards.workers / factor))}),
            "controller_sample_s": profile.controller_sample_s * factor,
            "kinds": {name: scale_model(kind, factor, num_devices) for name, kind in profile.kinds.items()},
        }
    )


def _simulators(costs: EnvCosts, factor: int) -> EnvCosts:
    """Returns the costs with a share of the host's processes; processes that are counted per device need no change."""
    return costs.model_copy(update={"host_processes": max(1, round(costs.host_processes / factor))})


def _scale_training(costs: TrainCosts, factor: int, num_devices: int) -> TrainCosts:
    slower = costs.speed(num_devices // factor) / costs.speed(num_devices)
    tokens = slower * factor
    return costs.model_copy(
        update={
            "token_s": costs.token_s * tokens,
            "inference_token_s": costs.inference_token_s * tokens,
            "optimizer_s": costs.optimizer_s * slower,
            # With fewer devices to shard over, the state per device keeps its size.
            "state_bytes": math.ceil(costs.state_bytes / factor),
            "moment_bytes": costs.moment_bytes // factor,
            "onload_s": costs.onload_s / factor,
            "offload_s": costs.offload_s / factor,
        }
    )
