"""Analytic bounds on a schedule's time and memory, cheap enough for every candidate."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

from interlace.core.state_parts import peak_bytes
from interlace.forecast.profile.types import InferenceCosts, Lengths, Profile, RolloutCosts, Turns
from interlace.forecast.search.candidates import period_steps
from interlace.forecast.search.episodes import EpisodeModel
from interlace.schedule.placement import Device, Pools
from interlace.schedule.schedule import Oversample, Schedule, TailBatching

_NORMAL = NormalDist()
SMALLEST = 8
"""Devices of the smallest model of a cluster."""
LEAST_PROMPTS, LEAST_SEQUENCES = 8, 8
"""Prompts of a step, and samples of a step for each device, that the smallest model of a workload keeps: with fewer
samples, engines have unequal numbers of them, and stages receive a step in few parts."""
POINTS = 400
"""Points at which a distribution of lengths is sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Sizes of a run that affect a schedule's speed."""

    num_devices: int
    prompts_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    roles: tuple[str, ...] = ("rollout", "actor")
    """Roles that compute on devices, in the order of the flow."""
    spans: tuple[int, ...] = (1,)
    """Devices that an instance of the rollout engine may have."""
    pools: Pools = ()
    """(kind, number) of a mixed cluster's devices, in their order."""
    num_envs: int = 0
    """Environments of the simulators; 0 for a recipe without simulators."""
    turns: float = 1.0
    """Mean number of turns of an episode."""

    def on_model(self, scale: int) -> tuple[int, Pools]:
        """Returns the number of devices of a scaled-down cluster, and their kinds."""
        return self.num_devices // scale, tuple((pool, count // scale) for pool, count in self.pools)

    def find_thinning(self, scale: int, profile: Profile) -> int:
        """Returns the divisor of the samples of a scaled-down cluster with which schedules still rank about as with all
        of them. It is 1 with simulators, whose episodes have fewer turns instead. An engine's cache, which is divided
        too, still holds the longest sample: a single sample runs even if it does not fit.
        """
        prompts, (num_devices, _) = self.prompts_per_step // scale, self.on_model(scale)
        if self.num_envs:
            return 1
        least = max(LEAST_PROMPTS, math.ceil(LEAST_SEQUENCES * num_devices / self.samples_per_prompt))
        cache = min(kind.rollout.cache_tokens(min(self.spans)) for kind in (profile, *profile.kinds.values()))
        longest = profile.lengths.prompt_tokens + self.max_new_tokens * self.turns
        most = min(prompts // least, int(cache / longest))
        return max((each for each in range(1, most + 1) if prompts % each == 0), default=1)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def requests_per_step(self) -> int:
        """Engine requests per step: the cost of simulating the step."""
        return round(self.samples_per_step * self.turns)


HELPS: Mapping[str, str] = {
    "state": "more devices per instance, a smaller model, or actor.lora",
    "moments": "more devices per instance, or actor.lora",
    "cache": "a smaller rollout.max_tokens",
    "working": "fewer tokens_per_microbatch",
}
"""Part of a role's memory -> settings that reduce it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleMemory:
    """Memory of an instance of a role on each of its devices."""

    role: str
    parts: Mapping[str, int]
    """Bytes by part: state (weights, gradients), moments, cache (key-value cache, buffers), working (activations)."""
    device_bytes: int
    """Memory of the smallest of its devices, in bytes."""
    num_devices: int

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """A role that is too large for its devices."""

    memory: RoleMemory
    needed_bytes: int

    @property
    def over_bytes(self) -> int:
        """Bytes that each device is short of."""
        return self.needed_bytes - self.memory.device_bytes

    @property
    def sentence(self) -> str:
        """Sentence with the largest part, the missing memory and the settings that help."""
        memory, count = self.memory, self.memory.num_devices
        part = memory.largest
        where = f"{count} device{'s' if count > 1 else ''}"
        return (
            f"{memory.role} on {where} needs {self.needed_bytes / 2**30:.1f} GiB on each, "
            f"which is {self.over_bytes / 2**30:.1f} GiB more than a device has. Its largest part is {part} with "
            f"{memory.parts[part] / 2**30:.1f} GiB: use {HELPS[part]}"
        )


def memory_by_part(
    schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...]
) -> list[RoleMemory]:
    """Returns the memory of one instance of each role on each kind of devices, when it computes alone."""
    found = []
    for role in workload.roles:
        for instance in _instance_of_kinds(schedule.instances(role, devices)).values():
            if not instance or role == "reward":  # simulators on the host, or a model whose size no profile has
                continue
            costs, count = profile.on(role, _find_pools(instance)), len(instance)
            parts = {
                "state": (costs.state_bytes - costs.moment_bytes) // count,
                "moments": costs.moment_bytes // count,
                "cache": costs.device_bytes,
                "working": costs.working_bytes,
            }
            smallest = min(device.memory_bytes for device in instance)
            found.append(RoleMemory(role=role, parts=parts, device_bytes=smallest, num_devices=count))
    return found


def misfit(schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...]) -> Misfit | None:
    """Returns the role that exceeds its devices' memory most, when it computes alone; None if every role fits.

    Roles that share a device take turns on it: the role that computes may use all of its memory.
    """
    found = []
    for memory in memory_by_part(schedule, profile, workload, devices):
        parts = memory.parts
        needed = peak_bytes(sum(parts.values()) - parts["working"], parts["moments"], parts["working"])
        if needed > memory.device_bytes:
            found.append(Misfit(memory=memory, needed_bytes=needed))
    return max(found, key=lambda each: each.over_bytes, default=None)


@lru_cache(maxsize=64)
def response_lengths(lengths: Lengths, max_new_tokens: int) -> tuple[float, ...]:
    """Returns response lengths at evenly spaced probabilities, ascending, cut at `max_new_tokens`."""
    num_capped = 0 if lengths.quantiles else round(lengths.cap_share * POINTS)
    num_drawn = POINTS - num_capped
    places = [(place + 0.5) / num_drawn for place in range(num_drawn)]
    if lengths.quantiles:
        last = len(lengths.quantiles) - 1
        found = [lengths.quantiles[min(last, round(place * last))] for place in places]
    else:
        spread = math.hypot(lengths.prompt_sigma, lengths.response_sigma)
        found = [lengths.median * math.exp(spread * _NORMAL.inv_cdf(place)) for place in places]
        found += [math.inf] * num_capped
    return tuple(min(length, float(max_new_tokens)) for length in found)


@lru_cache(maxsize=64)
def _make_episode(lengths: Lengths, max_new_tokens: int, turns: Turns | None, num_envs: int) -> EpisodeModel:
    responses = response_lengths(lengths, max_new_tokens)
    return EpisodeModel.of(responses, lengths.prompt_tokens, turns, has_envs=num_envs > 0)


def _find_episode(profile: Profile, workload: Workload) -> EpisodeModel:
    """Returns the mean episode of a workload; its profile may have turns that the recipe does not use."""
    turns = profile.turns if workload.turns > 1 or workload.num_envs else None
    return _make_episode(profile.lengths, workload.max_new_tokens, turns, workload.num_envs)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate:
    """Analytic estimates of the seconds of a step."""

    least_s: float
    """Lower estimate with perfect overlap: an expectation, not a proven bound."""
    likely_s: float
    """Estimate with the waits for the longest responses and between stages, for a step that trains on responses of mean
    length; it orders candidates."""


def estimate_step(
    schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...]
) -> StepEstimate:
    """Estimates the seconds of a step.

    The lower estimate adds up each device's work at the best rate of its role. A synchronous step also takes at least
    as long as its longest response alone on an engine.
    """
    lengths = response_lengths(profile.lengths, workload.max_new_tokens)
    generating, training = [0.0] * len(devices), [0.0] * len(devices)
    _add_generation(generating, schedule, profile, workload, devices)
    if "env" in workload.roles:
        _add_simulators(generating, schedule, profile, workload, devices)
    _add_training(training, schedule, profile, workload, devices)
    slowest = max(map(sum, zip(generating, training, strict=True)))
    if "env" in workload.roles:
        slowest = max(slowest, _on_host_s(schedule, profile, workload, devices))
    if schedule.staleness_bound == 0 and not isinstance(schedule.tail, Oversample | TailBatching):
        longest = _expect_longest(lengths, workload.samples_per_step) / schedule.sync_every
        kinds = _instance_of_kinds(schedule.instances("rollout", devices))
        slowest = max(slowest, longest * min(_alone_s(profile, each) for each in kinds.values()))
    return StepEstimate(
        least_s=slowest,
        likely_s=max(slowest, _likely_s(generating, training, schedule, profile, workload, devices)),
    )


def _likely_s(
    generating: Sequence[float], training: Sequence[float], schedule: Schedule, profile: Profile, workload: Workload,
    devices: tuple[Device, ...],
) -> float:  # fmt: skip
    """Returns the likely seconds of a step: waits of generation for its longest responses, and of stages for others.

    generating, training: seconds of each device at the best rates.
    """
    train_s = max(training)
    shares = any(one and other for one, other in zip(generating, training, strict=True))
    # Engines run empty before an update that drains them, and before a device switches roles when it is idle.
    drains = schedule.staleness_bound == 0 or schedule.on_update == "drain" or schedule.batching == "step"
    generate_s = max(generating)
    if drains or (shares and schedule.switch == "when_idle"):
        surplus = 1.0
        if isinstance(schedule.tail, Oversample | TailBatching):
            surplus = schedule.tail.prompts * schedule.tail.responses
        generate_s = _wave_s(schedule, profile, workload, devices, surplus=surplus) / schedule.sync_every
        if isinstance(schedule.tail, TailBatching):  # one round of a period contains the long responses
            whole_s, period = _wave_s(schedule, profile, workload, devices, surplus=1.0), period_steps(schedule)
            generate_s += (whole_s - generate_s) / period
        elif surplus > 1:
            lengths = _find_episode(profile, workload).lengths
            generate_s *= fmean(lengths) / fmean(lengths[: math.ceil(len(lengths) / surplus)])
        if workload.num_envs:  # engines and simulators take turns
            generate_s = max(generate_s, *generating)
    if shares:
        return generate_s + train_s
    if schedule.staleness_bound:
        return max(generate_s, train_s)
    last = schedule.granule_samples(
        "actor", prompts_per_step=workload.prompts_per_step, samples_per_prompt=workload.samples_per_prompt
    )
    return max(train_s, generate_s + train_s * last / workload.samples_per_step)


def _wave_s(
    schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...], *, surplus: float
) -> float:
    """Returns the seconds in which engines generate a step's episodes from the first to the last one.

    surplus: episodes that are launched for each one that the step needs. The wave ends when enough of them have ended.
    """
    episode = _find_episode(profile, workload)
    lengths, instances = episode.lengths, schedule.instances("rollout", devices)
    costs, span = profile.on("rollout", _find_pools(instances[0])), len(instances[0])
    if not isinstance(costs, RolloutCosts):
        return 0.0
    num_samples = surplus * workload.samples_per_step / len(instances)
    most = min(costs.max_running, workload.num_envs / len(instances) or math.inf)
    seconds = episode.tool_s + num_samples * episode.prefill_tokens * costs.prefill_token_s / costs.speed(span)
    length, grown = 0.0, 2 * episode.context_tokens * len(lengths) / sum(lengths)
    for place, longer in enumerate(lengths[: math.ceil(len(lengths) / surplus)]):
        left = num_samples * (1 - place / len(lengths))
        batch = max(1.0, min(left, most))
        reading_s = costs.context_token_s * batch * longer * grown / costs.context_speed(span)
        decode_s = costs.step_s(batch) / costs.speed(span) + reading_s
        seconds += (longer - length) * decode_s * max(1.0, left / batch)
        length = longer
    return seconds


def _add_training(
    busy: list[float], schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...]
) -> None:
    """Adds the work of the roles that read a step's tokens, at the best rate of each."""
    num_tokens = workload.samples_per_step * _find_episode(profile, workload).trained_tokens
    for role in workload.roles:
        if role in ("rollout", "env"):
            continue
        instances, rate = schedule.instances(role, devices), 0.0
        for instance in instances:
            costs = profile.on(role, _find_pools(instance))
            token_s = costs.token_s if isinstance(costs, InferenceCosts) else 0.0
            # The measured cost of a token can be 0 if calls have a positive one: no lower estimate follows from it.
            rate += costs.speed(len(instance)) / token_s if token_s else math.inf
        seconds = num_tokens / rate
        for device in (device for instance in instances for device in instance):
            busy[device.index] += seconds


def _add_simulators(
    busy: list[float], schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...]
) -> None:
    """Adds the simulation of a step's episodes, at the best rate of the environments that move together."""
    instances = [instance for instance in schedule.instances("env", devices) if instance]
    if not instances or profile.env is None or profile.turns is None:
        return  # on the host: see _on_host_s
    costs, together = profile.env, max(1, workload.num_envs // len(instances))
    chunk_s = min(costs.chunk_s(count) / count for count in {1, together})
    chunks = workload.samples_per_step * fmean(profile.turns.turns) / len(instances)
    for device in (device for instance in instances for device in instance):
        busy[device.index] += chunks * chunk_s


def _on_host_s(schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...]) -> float:
    """Returns the seconds in which the processes of the host simulate a step's episodes; 0 on devices."""
    if profile.env is None or profile.turns is None or any(schedule.instances("env", devices)):
        return 0.0
    chunks = workload.samples_per_step * fmean(profile.turns.turns)
    return chunks * profile.env.chunk_s(1) / profile.env.num_processes(len(devices))


def _add_generation(
    busy: list[float], schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...]
) -> None:
    instances = schedule.instances("rollout", devices)
    episode, rate = _find_episode(profile, workload), 0.0
    mean = fmean(episode.lengths)
    ahead = math.ceil(workload.samples_per_step * (1 + schedule.steps_ahead) / len(instances))
    counts = Counter(map(_find_pools, instances))
    for pools, kind in _instance_of_kinds(instances).items():
        costs, span = profile.on("rollout", pools), len(kind)
        if not isinstance(costs, RolloutCosts):
            continue
        reading_s = costs.context_token_s * episode.context_tokens / costs.context_speed(span)
        best_s = _best_token_s(costs, min(costs.max_running, ahead))
        each = mean * (best_s / costs.speed(span) + reading_s) + episode.turns * costs.sequence_s
        each += episode.prefill_tokens * costs.prefill_token_s / costs.speed(span)
        rate += counts[pools] / each if each else math.inf
    for device in (device for instance in instances for device in instance):
        busy[device.index] += workload.samples_per_step / rate


def _find_pools(instance: Sequence[Device]) -> tuple[str, ...]:
    return tuple({device.pool: None for device in instance})


def _instance_of_kinds(instances: Sequence[tuple[Device, ...]]) -> dict[tuple[str, ...], tuple[Device, ...]]:
    """Returns the first instance of each combination of pools. The instances of a role have equal sizes."""
    return {_find_pools(instance): instance for instance in reversed(instances)}


def _alone_s(profile: Profile, instance: Sequence[Device]) -> float:
    """Returns the seconds of a decode step for one sequence."""
    costs = profile.on("rollout", _find_pools(instance))
    return costs.steps[0][1] / costs.speed(len(instance)) if isinstance(costs, RolloutCosts) else 0.0


def _best_token_s(costs: RolloutCosts, most: int) -> float:
    """Returns the seconds per token at the best batch of at most `most` sequences."""
    batches = [min(batch, most) for batch, _ in costs.steps] + [most]
    return min(costs.step_s(batch) / batch for batch in batches)


def prefill_cost(profile: Profile) -> float:
    """Returns the time to recompute a token of a context, as a share of decoding one in the best batch."""
    costs = profile.rollout
    return round(costs.prefill_token_s / _best_token_s(costs, costs.max_running), 3)


def _expect_longest(lengths: Sequence[float], count: int) -> float:
    """Returns the expected length of the longest of `count` responses."""
    return lengths[min(len(lengths) - 1, math.floor((1 - 1 / (count + 1)) * len(lengths)))]


def coarser(workload: Workload) -> tuple[int, ...]:
    """Returns the scales of the coarse and the middle fidelity, then the scales for the final one, the closest first.

    Scales are common divisors of the numbers of devices and prompts.
    """
    kinds = [count for _, count in workload.pools] or [workload.num_devices]
    common = math.gcd(workload.prompts_per_step, workload.num_envs, *kinds)
    fitting = [
        scale
        for scale in range(1, common + 1)
        if common % scale == 0 and workload.num_devices // scale >= min(SMALLEST, workload.num_devices)
    ]
    coarse = fitting[-1]
    middle = min((scale for scale in fitting if scale * scale >= coarse), default=1)
    return coarse, middle, *(scale for scale in fitting if scale <= middle)
