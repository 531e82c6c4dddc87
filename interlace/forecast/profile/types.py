"""Costs of each worker on one kind of device: measured by `interlace profile`, read by the simulator.

Costs are for an instance on one device. On n devices work takes `1 / speed(n)` of the time, and the state is sharded
over the devices.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.decode_costs import read_curve
from interlace.forecast.links import Links


def speed_up(num_devices: int, efficiency: float) -> float:
    """Returns the speed of `num_devices` relative to one, if each doubling keeps the share `efficiency` of its ideal
    gain.
    """
    return float((2 * efficiency) ** math.log2(num_devices)) if num_devices > 1 else 1.0


CONTROLLER = "controller"
"""Name of the controller's thread in a pair of Interference."""
Scaling: TypeAlias = tuple[tuple[int, float], ...]
"""(devices, speed relative to one device), measured or stated, by increasing number of devices. Interpolated linearly
in the logarithm of the number, constant after the last point."""


def _check_scaling(name: str, scaling: Scaling) -> None:
    numbers = [number for number, _ in scaling]
    if numbers and (numbers[0] < 2 or numbers != sorted(set(numbers))):
        raise ValueError(f"{name} needs 2 or more devices, each point more than the one before; it has {numbers}")
    if any(not 0 < times <= number for number, times in scaling):
        raise ValueError(f"{name}: n devices are more than 0 times and at most n times as fast as one")


def _read_scaling(scaling: Scaling, num_devices: int) -> float:
    points = [(0.0, 1.0), *((math.log(number), times) for number, times in scaling)]
    return read_curve(points, min(math.log(num_devices), points[-1][0]))


class StateCosts(Config):
    """Memory of a worker's state, and the time to move the state."""

    state_bytes: int = Field(default=0, ge=0)
    """Bytes of one instance's state, sharded over its devices."""
    device_bytes: int = Field(default=0, ge=0)
    """Further bytes on each of its devices: KV cache, buffers."""
    moment_bytes: int = Field(default=0, ge=0)
    """Part of `state_bytes` for the optimizer's moments, which only an optimizer step needs on the devices."""
    working_bytes: int = Field(default=0, ge=0)
    """Bytes on each of its devices during computation: activations, logits, gathered layers of one micro-batch."""
    onload_s: float = Field(default=0.0, ge=0)
    """Seconds to move the whole state from the host to the device, over one device's link."""
    offload_s: float = Field(default=0.0, ge=0)
    efficiency: float = Field(default=0.9, ge=0.5, le=1)
    """Share of the speed that is kept at each doubling of devices; at 0.5 an instance is no faster on several."""
    scaling: Scaling = ()
    """Speed of n devices relative to one, measured or stated. If set, it replaces `efficiency`."""

    @model_validator(mode="after")
    def _check_state_size(self) -> Self:
        _check_scaling("scaling", self.scaling)
        if self.moment_bytes > self.state_bytes:
            raise ValueError(f"moment_bytes ({self.moment_bytes}) are a part of state_bytes ({self.state_bytes})")
        return self

    def speed(self, num_devices: int) -> float:
        """Returns the speed of an instance on `num_devices` relative to one device."""
        if not self.scaling or num_devices <= 1:
            return speed_up(num_devices, self.efficiency)
        return _read_scaling(self.scaling, num_devices)

    @property
    def slowness(self) -> float:
        """Measure of seconds that orders kinds of devices by their slowness."""
        return self.onload_s

    def memory_bytes(self, num_devices: int) -> int:
        """Returns the bytes needed on each device."""
        return self.state_bytes // num_devices + self.device_bytes


class RolloutCosts(StateCosts):
    """Costs of a rollout engine. A decode step of b sequences with c cached tokens takes `step_s(b) + c *
    context_token_s`.
    """

    steps: tuple[tuple[int, float], ...]
    """(sequences, seconds of a decode step without context), by increasing number of sequences; linear in between."""
    context_token_s: float = Field(default=0.0, ge=0)
    """Seconds per decode step for each cached token that attention reads."""
    context_scaling: Scaling = ()
    """Speed of n devices for reading cached tokens, whose key-value heads are divided among the devices. If empty, the
    same as for other work."""
    call_s: float = Field(default=0.0, ge=0)
    """Seconds of a serve call in addition to its decode steps."""
    min_call_s: float = Field(default=0.0, ge=0)
    """Minimum seconds of a serve call: it returns at the end of a sequence, but not earlier than this."""
    intake_s: float = Field(default=0.0, ge=0)
    """Additional seconds of a pass in which sequences begin to run, independent of their number and length. A full
    engine has such a pass for almost every sequence, because each begins when another one ends."""
    sequence_s: float = Field(default=0.0, ge=0)
    """Seconds for each sequence that begins to run, including the return of its response. A request that waits in the
    engine takes none: `abort_resume` withdraws and submits all of them at each publication."""
    prefill_token_s: float = Field(default=0.0, ge=0)
    kv_tokens: int = Field(ge=1)
    """Capacity of one device's KV cache, in tokens."""
    engine_kv_tokens: int = Field(default=0, ge=0)
    """Capacity of an engine's KV cache on any number of devices, if `rollout.max_tokens` sets it; 0 for no limit."""
    kv_token_s: float = Field(default=0.0, ge=0)
    """Seconds to move one cached token to the host or back, when a device switches roles during generation."""
    max_running: int = Field(default=4096, ge=1)
    """Largest number of sequences that decode concurrently."""
    eviction: Literal["fewest_tokens", "least_recent"] = "fewest_tokens"
    """Eviction of contexts between two turns. fewest_tokens: whole contexts, the smallest first, as the native engine
    does. least_recent: the least recently used tokens, also of ended samples (the prefix cache of vLLM)."""
    update_s: float = Field(default=0.0, ge=0)
    """Seconds to replace all weights."""
    max_devices: int = Field(default=0, ge=0)
    """Largest number of devices of an instance: 1 for an engine that cannot divide its model; 0 for no limit."""

    @property
    def slowness(self) -> float:
        return self.steps[0][1]

    @model_validator(mode="after")
    def _check_step_points(self) -> Self:
        batches = [batch for batch, _ in self.steps]
        if not batches or batches[0] < 1 or batches != sorted(set(batches)):
            raise ValueError(f"steps needs batches of 1 or more, each larger than the one before; they are {batches}")
        if any(seconds <= 0 for _, seconds in self.steps):
            raise ValueError("a decode step takes more than 0 seconds")
        _check_scaling("context_scaling", self.context_scaling)
        return self

    def context_speed(self, num_devices: int) -> float:
        """Returns the speed of reading cached tokens on `num_devices` relative to one device."""
        if not self.context_scaling or num_devices <= 1:
            return self.speed(num_devices)
        return _read_scaling(self.context_scaling, num_devices)

    def cache_tokens(self, num_devices: int) -> int:
        """Returns the capacity of the KV cache of an engine on `num_devices`, in tokens."""
        capacity = self.kv_tokens * num_devices
        return min(capacity, self.engine_kv_tokens) if self.engine_kv_tokens else capacity

    def can_span(self, num_devices: int) -> bool:
        """Returns whether an instance may have this number of devices."""
        return not self.max_devices or num_devices <= self.max_devices

    def step_s(self, batch: float) -> float:
        """Predicts a decode step of `batch` sequences without context; extrapolates linearly beyond the last point."""
        return read_curve(self.steps, batch)


class InferenceCosts(StateCosts):
    """Costs of log-probs or values without gradient."""

    token_s: float = Field(ge=0)
    """Seconds per prompt or response token."""
    call_s: float = Field(default=0.0, ge=0)

    @property
    def slowness(self) -> float:
        return self.token_s


class TrainCosts(InferenceCosts):
    """Costs of a trained model. `token_s`: forward and backward. `inference_token_s`: log-probs or values only."""

    inference_token_s: float = Field(default=0.0, ge=0)
    optimizer_s: float = Field(default=0.0, ge=0)
    export_s: float = Field(default=0.0, ge=0)
    """Seconds to export all weights to the engines."""

    @property
    def inference(self) -> InferenceCosts:
        """Costs of the same model in inference: a quarter of its state, and no gradient of the logits."""
        return InferenceCosts(
            state_bytes=self.state_bytes // 4,
            device_bytes=self.device_bytes,
            working_bytes=self.working_bytes // 2,
            onload_s=self.onload_s / 4,
            offload_s=self.offload_s / 4,
            efficiency=self.efficiency,
            scaling=self.scaling,
            token_s=self.inference_token_s,
            call_s=self.call_s,
        )


class RewardCosts(Config):
    """Costs of scoring on the host: log-normal latencies, and the share of right answers."""

    median_s: float = Field(default=0.0, ge=0)
    sigma: float = Field(default=0.0, ge=0)
    """Standard deviation of the latency's logarithm."""
    call_s: float = Field(default=0.0, ge=0)
    """Seconds of a call in addition to scoring. The controller spends them, one call after another."""
    max_s: float = Field(default=60.0, gt=0)
    """Time limit of scoring, in seconds."""
    workers: int = Field(default=64, ge=1)
    """Answers that are scored concurrently."""
    solve_rate: float = Field(default=0.5, ge=0, le=1)
    """Mean share of right answers."""
    solve_spread: float = Field(default=0.3, ge=0, le=1)
    """Spread of the solve rate over prompts. At 0, all prompts have the mean rate; at 1, each is always or never
    solved."""
    fail_share: float = Field(default=0.0, ge=0, le=1)
    """Share of answers whose scoring fails."""


class Lengths(Config):
    """Lengths of prompts and responses: log-normal by prompt and by response, or measured quantiles."""

    prompt_tokens: int = Field(default=64, ge=1)
    """Mean prompt length, in tokens."""
    median: float = Field(default=256.0, ge=1)
    """Median response length, in tokens."""
    prompt_sigma: float = Field(default=0.5, ge=0)
    """Standard deviation, between prompts, of the logarithm of response length."""
    response_sigma: float = Field(default=0.7, ge=0)
    """Standard deviation of the same logarithm between responses to one prompt."""
    cap_share: float = Field(default=0.0, ge=0, le=1)
    """Share of responses that always reach max_new_tokens, because they repeat themselves."""
    quantiles: tuple[float, ...] = ()
    """Response lengths at evenly spaced probabilities from 0 to 1. If set, they replace `median` and `cap_share`, and
    the two sigmas only determine the prompt's share of the variance."""
    rank_correlation: float = Field(default=0.0, ge=0, le=1)
    """Spearman's rank correlation of predicted and true response lengths. At 0, dispatch by length has no useful
    prediction; at 1, it has the true lengths."""


class EnvCosts(StateCosts):
    """Costs of simulators, rendering included. On a device the environments of a chunk step together; on the host each
    steps in a separate process.
    """

    bound: Literal["device", "host"] = "device"
    """Resource that limits the simulators. Simulators that are bound by processor cores cannot be placed on devices."""
    chunks: tuple[tuple[int, float], ...] = Field(min_length=1)
    """(environments, seconds of a chunk in all of them), by increasing number of environments; linear in between."""
    reset_s: float = Field(default=0.0, ge=0)
    """Seconds of a reset; on a device, of all environments that are reset together."""
    host_processes: int = Field(default=1, ge=1)
    """Parallel simulator processes on the host."""
    processes_per_device: int = Field(default=0, ge=0)
    """Parallel simulator processes per device, if the host grows with the cluster. If 0, `host_processes` on any
    cluster."""

    @model_validator(mode="after")
    def _check_chunk_points(self) -> Self:
        numbers = [number for number, _ in self.chunks]
        if numbers[0] < 1 or numbers != sorted(set(numbers)):
            raise ValueError(f"chunks needs 1 or more environments, each point more than the one before: {numbers}")
        return self

    def num_processes(self, num_devices: int) -> int:
        """Returns the number of simulator processes on the host of a cluster."""
        return self.processes_per_device * num_devices or self.host_processes

    def chunk_s(self, num_envs: int) -> float:
        """Predicts a chunk in `num_envs` environments together; extrapolates linearly beyond the last point."""
        return read_curve(self.chunks, num_envs)


class Turns(Config):
    """Model of an episode with several turns. `lengths` gives the length of each answer. Quantiles are at evenly spaced
    probabilities from 0 to 1.
    """

    turns: tuple[float, ...] = Field(min_length=1)
    """Quantiles of the number of turns per episode."""
    given_tokens: tuple[float, ...] = Field(min_length=1)
    """Quantiles of the tokens added before a later turn: a tool's result, a user's message."""
    tool_s: tuple[float, ...] = Field(min_length=1)
    """Quantiles of the seconds between two turns: the episode's code and its tools."""
    tools: Literal["asynchronous", "synchronous"] = "asynchronous"
    """synchronous: tools run as a batch. They start when all episodes have ended their turns, and the next turns begin
    when the last tool has ended."""
    reward: float = Field(default=0.5, ge=0, le=1)
    """Share of right episodes, if the episode provides the reward."""


class Interference(Config):
    """Slowdown of one worker by another on a different device, through shared cores, memory or the GIL."""

    role: str
    """Role that is slowed down."""
    beside: str
    """Role whose instance works at the same time; `controller` for the thread of the controller."""
    slowdown: float = Field(ge=1)
    """Relative duration of the work."""
    call_slowdown: float | None = Field(default=None, ge=1)
    """Relative duration of the work during the constant part of a training or inference call of either worker, most of
    which is Python. `slowdown` is then for the rest of the call, which needs no GIL. If None, both are equal."""

    def at(self, call_share: float) -> float:
        """Returns the slowdown if the constant part is this share of a call."""
        call_slowdown = self.slowdown if self.call_slowdown is None else self.call_slowdown
        return self.slowdown + call_share * (call_slowdown - self.slowdown)


class RunSizes(Config):
    """Sizes of the run that a profile's lengths belong to."""

    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=1)
    max_new_tokens: int = Field(ge=1)
    num_envs: int = Field(default=0, ge=0)
    """Environments of the simulators; 0 for a run without simulators."""


class Profile(Config):
    """Costs of a recipe's workers on one kind of device."""

    device: str
    """Name of the kind of device: `cpu, one core of ...`."""
    basis: Literal["measured", "roofline"] = "measured"
    """Origin of the costs: measured workers, or data sheets."""
    kind: str = Field(default="sim", pattern="[a-z][a-z0-9]*")
    """Pool of a virtual cluster, as placements name it."""
    kinds: Mapping[str, "Profile"] = {}
    """Costs on the other kinds of devices of a mixed cluster, by pool. Lengths, rewards and controller costs of the
    first profile apply to the whole cluster."""
    model: str = ""
    """Model of the workers, as a recipe names it; empty if unknown."""
    sizes: RunSizes | None = None
    """Sizes of the run that was measured or assumed."""
    device_hour_cost: float = Field(default=0.0, ge=0)
    """Price of one device for an hour, in any currency; 0 if unknown."""
    source: str = ""
    """Source of the figures: a command, or papers."""
    device_memory_bytes: int = Field(ge=1)
    links: Links | None = None
    """Links of the cluster. If None, moving weights and samples takes only `export_s` and `update_s`. In a mixed
    cluster, the first profile's links apply."""
    rollout: RolloutCosts
    actor: TrainCosts
    reference: InferenceCosts | None = None
    """Costs of the reference. If None, the actor's inference costs apply."""
    critic: TrainCosts | None = None
    """Costs of the critic. If None, the actor's costs apply."""
    reward: RewardCosts = RewardCosts()
    lengths: Lengths = Lengths()
    """Lengths of responses; with `turns`, of each turn's response."""
    env: EnvCosts | None = None
    """Costs of simulators; None if the recipe's episodes have none."""
    turns: Turns | None = None
    """Model of turns; None if each sample is a single response."""
    controller_sample_s: float = Field(default=0.0, ge=0)
    """Controller seconds per sample, spent sequentially: channels, groups and batches."""
    controller_step_s: float = Field(default=0.0, ge=0)
    """Controller seconds per step during which the trainer waits: admission, and the time between calls."""
    step_noise: float = Field(default=0.0, ge=0)
    """Relative differences between measured steps that no cost explains: the standard deviation of the steps of a run,
    or the change from one run to its repetition if that is larger. Schedules whose predicted speeds differ by less are
    tied. 0 if not measured."""
    interference: tuple[Interference, ...] = ()
    """Slowdowns of overlapping roles. All other costs are for a worker that works alone; pairs not listed do not
    interfere."""

    @property
    def label(self) -> str:
        """Name of the kind of device for display; a roofline is marked as one, with the model that it is of."""
        if self.basis == "measured":
            return self.device
        return f"{self.device} (roofline{f' of {self.model}' if self.model else ''}, not measured)"

    def on(self, role: str, pools: Iterable[str]) -> StateCosts:
        """Returns a role's costs on devices of these pools; for several kinds, the costs of the slowest.

        If the role was not measured, the costs of another role apply.
        """
        profiles = [self.kinds.get(pool, self) for pool in dict.fromkeys(pools)] or [self]
        return max([profile.costs_of(role) for profile in profiles], key=lambda costs: costs.slowness)

    def costs_of(self, role: str) -> StateCosts:
        """Returns a role's costs on this kind of device; if it was not measured, the costs of another role.

        A reward model has no costs here: it is not the trained model, and `reward` has the time of its scores.
        """
        if role == "rollout":
            return self.rollout
        if role == "reward":
            return StateCosts()
        if role == "env" and self.env:
            return self.env
        if role == "reference":
            return self.reference or self.actor.inference
        return (self.critic or self.actor) if role == "critic" else self.actor
