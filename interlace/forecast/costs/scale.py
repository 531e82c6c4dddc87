"""Smaller model of a large cluster with the same work per device, so that a step takes about as long."""

import math
from typing import TypeVar

from interlace.forecast.profile.types import EnvCosts, InferenceCosts, Profile, RewardCosts, RolloutCosts, TrainCosts
from interlace.schedule.placement import HOST, Granule, Share
from interlace.schedule.schedule import Migrate, Schedule

C = TypeVar("C", bound=InferenceCosts)


ANY = Schedule()
"""Schedule with the default granules and placements."""


def scale_model(profile: Profile, factor: int, num_devices: int, schedule: Schedule = ANY) -> Profile:
    """Returns the costs of a model with `num_devices / factor` devices and the same share of the prompts.

    The model has fewer engines with the same number of sequences each. An instance that spans many devices takes the
    same time: its work is divided by the factor, and so is the speed of its devices. The controller, which is one in
    both, has fewer samples and calls of the reward, each of which takes longer. The scorers and the simulators on the
    host are one pool in both, of which the model has a share.

    schedule: its granule of the reward and the placement of its simulators. A step has as many calls of the reward in
    the model if the granule is a share of the step.
    """
    if factor == 1:
        return profile
    rewards, on_host = profile.reward, schedule.placement.of("env").devices == HOST
    call_s = rewards.call_s * (1 if _is_per_step(schedule.granularity.of("reward")) else factor)
    return profile.model_copy(
        update={
            "actor": _scale_training(profile.actor, factor, num_devices),
            "critic": profile.critic and _scale_training(profile.critic, factor, num_devices),
            "env": profile.env and _share_simulators(profile.env, factor, on_host=on_host),
            "reward": _share_scorers(rewards, factor).model_copy(update={"call_s": call_s}),
            "controller_sample_s": profile.controller_sample_s * factor,
            "kinds": {name: scale_model(kind, factor, num_devices, schedule) for name, kind in profile.kinds.items()},
        }
    )


def shorten_episodes(profile: Profile, factor: int) -> Profile:
    """Returns costs of robots' episodes with 1 / `factor` of the turns, each of which takes `factor` times as long.

    Only for episodes whose turns have separate contexts. Costs of whole steps (updates, changes of devices, resets)
    are unchanged, so a step takes about as long with a fraction of the events.
    """
    if factor == 1 or profile.turns is None or profile.env is None:
        return profile
    env, turns = profile.env, profile.turns
    return profile.model_copy(
        update={
            "rollout": _slow_calls(profile.rollout, factor),
            "actor": _slow_tokens(profile.actor, factor),
            "critic": profile.critic and _slow_tokens(profile.critic, factor),
            "reference": profile.reference and _slow_tokens(profile.reference, factor),
            "env": env.model_copy(update={"chunks": tuple((count, seconds * factor) for count, seconds in env.chunks)}),
            "turns": turns.model_copy(update={"turns": tuple(count / factor for count in turns.turns)}),
            "links": profile.links and profile.links.enlarge_samples(factor),
            "kinds": {name: shorten_episodes(kind, factor) for name, kind in profile.kinds.items()},
        }
    )


def thin_samples(profile: Profile, factor: int, granule: Granule | Share = "sample") -> Profile:
    """Returns costs for 1 / `factor` of the samples, each of which costs as much as `factor` samples.

    A batch of n sequences takes the time of `factor` n sequences, and fills as much of the cache. A step takes about as
    long, except that the longest of fewer responses is shorter. The `call_s` of models is unchanged: a stage on devices
    takes all samples that are ready in one call, so a step has about as many calls. granule: of the reward.
    """
    if factor == 1:
        return profile
    return profile.model_copy(
        update={
            "rollout": _thin_batches(profile.rollout, factor),
            "actor": _slow_tokens(profile.actor, factor),
            "critic": profile.critic and _slow_tokens(profile.critic, factor),
            "reference": profile.reference and _slow_tokens(profile.reference, factor),
            "reward": _thin_scores(profile.reward, factor, granule),
            "controller_sample_s": profile.controller_sample_s * factor,
            "links": profile.links and profile.links.enlarge_samples(factor),
            "kinds": {name: thin_samples(kind, factor, granule) for name, kind in profile.kinds.items()},
        }
    )


def thin_limits(schedule: Schedule, factor: int) -> Schedule:
    """Returns the schedule with 1 / `factor` of its fixed numbers of samples: shares of a step need no change."""
    if factor == 1:
        return schedule

    def divide(count: object) -> object:
        return max(1, count // factor) if isinstance(count, int) else count

    granules = {stage: divide(granule) for stage, granule in schedule.granularity}
    changed: dict[str, object] = {
        "concurrency": divide(schedule.concurrency),
        "granularity": schedule.granularity.model_copy(update=granules),
    }
    if isinstance(schedule.tail, Migrate):
        changed["tail"] = schedule.tail.model_copy(update={"batch": divide(schedule.tail.batch)})
    return schedule.model_copy(update=changed)


def _thin_scores(costs: RewardCosts, factor: int, granule: Granule | Share) -> RewardCosts:
    """Returns the costs with a share of the scorers, and calls that take as long for all samples of a step."""
    calls: float = 1 if _is_per_step(granule) else factor
    if isinstance(granule, int):  # thin_limits divides it, too
        calls = factor * max(1, granule // factor) / granule
    return _share_scorers(costs, factor).model_copy(update={"call_s": costs.call_s * calls})


def _share_scorers(costs: RewardCosts, factor: int) -> RewardCosts:
    """Returns the costs with a share of the scorers. If their number is no multiple of `factor`, they are slower or
    faster, so that all samples of a step take as long.
    """
    workers, slower = _divide_pool(costs.workers, factor)
    return costs.model_copy(
        update={"workers": workers, "median_s": costs.median_s * slower, "max_s": costs.max_s * slower}
    )


def _divide_pool(size: int, factor: int) -> tuple[int, float]:
    """Returns the size of a share of a pool, and how many times as long each of its workers takes."""
    share = max(1, size // factor)
    return share, share * factor / size


def _is_per_step(granule: Granule | Share) -> bool:
    """Returns whether a step has the same number of calls with fewer samples."""
    return granule == "step" or (isinstance(granule, str) and granule.endswith("%"))


def _thin_batches(costs: RolloutCosts, factor: int) -> RolloutCosts:
    fields = ("context_token_s", "call_s", "intake_s", "sequence_s", "prefill_token_s", "kv_token_s")
    slower: dict[str, object] = {name: getattr(costs, name) * factor for name in fields}
    batches = sorted({max(1, batch // factor) for batch, _ in costs.steps})
    limits = ["kv_tokens", "max_running", *(["engine_kv_tokens"] if costs.engine_kv_tokens else [])]
    smaller = {name: max(1, getattr(costs, name) // factor) for name in limits}
    steps = tuple((batch, costs.step_s(batch * factor)) for batch in batches)
    return costs.model_copy(update={**slower, **smaller, "steps": steps})


def _slow_calls(costs: RolloutCosts, factor: int) -> RolloutCosts:
    fields = ("context_token_s", "call_s", "min_call_s", "intake_s", "sequence_s", "prefill_token_s")
    slower: dict[str, object] = {name: getattr(costs, name) * factor for name in fields}
    steps = tuple((batch, seconds * factor) for batch, seconds in costs.steps)
    return costs.model_copy(update={**slower, "steps": steps})


def _slow_tokens(costs: C, factor: int) -> C:
    slower = {"token_s": costs.token_s * factor}
    if isinstance(costs, TrainCosts):
        slower["inference_token_s"] = costs.inference_token_s * factor
    return costs.model_copy(update=slower)


def _share_simulators(costs: EnvCosts, factor: int, *, on_host: bool) -> EnvCosts:
    """Returns the costs with a share of the host's processes. If their number is no multiple of `factor`, simulators on
    the host are slower or faster, so that all episodes of a step take as long. Processes that are counted per device
    need no change.
    """
    processes, slower = _divide_pool(costs.host_processes, factor)
    fewer = costs.model_copy(update={"host_processes": processes})
    if costs.processes_per_device or not on_host:
        return fewer
    chunks = tuple((count, seconds * slower) for count, seconds in costs.chunks)
    return fewer.model_copy(update={"chunks": chunks, "reset_s": costs.reset_s * slower})


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
