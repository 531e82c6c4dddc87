"""Costs of each worker on one machine: measured by `interlace profile`, read by the simulator.

Costs are those of an instance on one device. On n devices work takes `1 / speed(n)` of the time, and state is sharded
over them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.decode_costs import read_curve
from interlace.core.state_parts import peak_bytes
from interlace.forecast.links import Links


def speed_up(num_devices: int, efficiency: float) -> float:
    """How many times faster `num_devices` are than one, where each doubling keeps `efficiency` of what it promises."""
    return float((2 * efficiency) ** math.log2(num_devices)) if num_devices > 1 else 1.0


Scaling: TypeAlias = tuple[tuple[int, float], ...]
"""(devices, times as fast as on one), measured or stated, by rising number of devices; linear in their logarithm in
between, no faster beyond the last."""


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
    """Memory that a worker's state takes, and the time that moving the state takes."""

    state_bytes: int = Field(default=0, ge=0)
    """Bytes of one instance's state, sharded over its devices."""
    device_bytes: int = Field(default=0, ge=0)
    """On each of its devices beside that: KV cache, buffers."""
    moment_bytes: int = Field(default=0, ge=0)
    """Part of `state_bytes` that is the optimizer's moments: an update alone needs them on the devices."""
    working_bytes: int = Field(default=0, ge=0)
    """On each of its devices while it computes: activations, logits, gathered layers of one micro-batch."""
    onload_s: float = Field(default=0.0, ge=0)
    """Host to device, all of the state over one device's link."""
    offload_s: float = Field(default=0.0, ge=0)
    efficiency: float = Field(default=0.9, ge=0.5, le=1)
    """Share of speed that is kept at each doubling of devices; 0.5 is an instance that is no faster on several."""

    scaling: Scaling = ()
    """Speed of n devices against one's, measured or stated. Given, it replaces `efficiency`."""

    @model_validator(mode="after")
    def _grows(self) -> Self:
        _check_scaling("scaling", self.scaling)
        if self.moment_bytes > self.state_bytes:
            raise ValueError(f"moment_bytes ({self.moment_bytes}) are a part of state_bytes ({self.state_bytes})")
        return self

    def speed(self, num_devices: int) -> float:
        """Returns how many times as fast as on one device an instance works on `num_devices`."""
        if not self.scaling or num_devices <= 1:
            return speed_up(num_devices, self.efficiency)
        return _read_scaling(self.scaling, num_devices)

    @property
    def slowness(self) -> float:
        """Seconds by which kinds of devices are compared."""
        return self.onload_s

    def memory_bytes(self, num_devices: int) -> int:
        """Needed on each device."""
        return self.state_bytes // num_devices + self.device_bytes

    def peak_bytes(self, num_devices: int) -> int:
        """Returns the bytes that each device must have at least."""
        return peak_bytes(self.memory_bytes(num_devices), self.moment_bytes // num_devices, self.working_bytes)


class RolloutCosts(StateCosts):
    """A rollout engine. A decode step of b sequences that hold c tokens takes `step_s(b) + c * context_token_s`."""

    steps: tuple[tuple[int, float], ...]
    """(sequences, seconds of a decode step without context), by rising number of sequences; linear in between."""
    context_token_s: float = Field(default=0.0, ge=0)
    """Seconds a step for each cached token that attention reads."""
    context_scaling: Scaling = ()
    """The same of n devices for reading cached tokens, whose key-value heads are divided among them; empty: as all
    else."""
    call_s: float = Field(default=0.0, ge=0)
    """Seconds of a serve call beside its decode steps."""
    min_call_s: float = Field(default=0.0, ge=0)
    """A serve call returns when a sequence ends; one that began less than this ago goes on."""
    intake_s: float = Field(default=0.0, ge=0)
    """Seconds more of a serve call that takes requests in, however few and short."""
    sequence_s: float = Field(default=0.0, ge=0)
    """Seconds of a serve call for each request that it takes in, its response on the way back included."""
    prefill_token_s: float = Field(default=0.0, ge=0)
    kv_tokens: int = Field(ge=1)
    """Tokens that the KV cache of one device holds."""
    kv_token_s: float = Field(default=0.0, ge=0)
    """Seconds to move one cached token to the host or back, where a device changes hands in the middle."""
    max_running: int = Field(default=4096, ge=1)
    """Sequences that decode at once."""
    update_s: float = Field(default=0.0, ge=0)
    """To swap all weights."""

    @property
    def slowness(self) -> float:
        return self.steps[0][1]

    @model_validator(mode="after")
    def _rising(self) -> Self:
        batches = [batch for batch, _ in self.steps]
        if not batches or batches[0] < 1 or batches != sorted(set(batches)):
            raise ValueError(f"steps needs batches of 1 or more, each larger than the one before; they are {batches}")
        if any(seconds <= 0 for _, seconds in self.steps):
            raise ValueError("a decode step takes more than 0 seconds")
        _check_scaling("context_scaling", self.context_scaling)
        return self

    def context_speed(self, num_devices: int) -> float:
        """Returns how many times as fast as on one device cached tokens are read on `num_devices`."""
        if not self.context_scaling or num_devices <= 1:
            return self.speed(num_devices)
        return _read_scaling(self.context_scaling, num_devices)

    def step_s(self, batch: int) -> float:
        """Predicts a decode step of `batch` sequences without context; beyond the last point the last slope goes on."""
        return read_curve(self.steps, batch)


class InferenceCosts(StateCosts):
    """Log-probs or values without gradient."""

    token_s: float = Field(ge=0)
    """Prompt and response tokens alike."""
    call_s: float = Field(default=0.0, ge=0)

    @property
    def slowness(self) -> float:
        return self.token_s


class TrainCosts(InferenceCosts):
    """A trained model. `token_s` is of forward and backward, `inference_token_s` of log-probs or values alone."""

    inference_token_s: float = Field(default=0.0, ge=0)
    optimizer_s: float = Field(default=0.0, ge=0)
    export_s: float = Field(default=0.0, ge=0)
    """To hand all weights to the engines."""

    @property
    def inference(self) -> InferenceCosts:
        """Returns the costs of the same model in inference: a quarter of its state, and no gradient of the logits."""
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
    """Scoring on the host: log-normal latencies, and how often an answer is right."""

    median_s: float = Field(default=0.0, ge=0)
    sigma: float = Field(default=0.0, ge=0)
    """Standard deviation of the latency's logarithm."""
    call_s: float = Field(default=0.0, ge=0)
    """Seconds of a call beside scoring: the controller's, which makes one call after another."""
    max_s: float = Field(default=60.0, gt=0)
    """Time limit."""
    workers: int = Field(default=64, ge=1)
    """Answers scored at once."""
    solve_rate: float = Field(default=0.5, ge=0, le=1)
    """Mean share of answers that are right."""
    solve_spread: float = Field(default=0.3, ge=0, le=1)
    """How unlike prompts are: 0, all are solved at the mean rate; 1, each always or never."""
    fail_share: float = Field(default=0.0, ge=0, le=1)
    """Share of answers whose scoring fails."""


class Lengths(Config):
    """How long prompts and responses are: log-normal by prompt and by response, or measured quantiles."""

    prompt_tokens: int = Field(default=64, ge=1)
    """Mean."""
    median: float = Field(default=256.0, ge=1)
    """Response tokens."""
    prompt_sigma: float = Field(default=0.5, ge=0)
    """Standard deviation, between prompts, of the logarithm of response length."""
    response_sigma: float = Field(default=0.7, ge=0)
    """The same between responses to one prompt."""
    cap_share: float = Field(default=0.0, ge=0, le=1)
    """Share of responses that run to max_new_tokens whatever else (they repeat themselves)."""
    quantiles: tuple[float, ...] = ()
    """Response lengths at evenly spaced probabilities from 0 to 1. Given, they replace median and cap_share, and the
    two sigmas only say how much of a length is the prompt's."""
    rank_correlation: float = Field(default=0.0, ge=0, le=1)
    """Spearman's rank correlation of predicted and true response lengths. With 0, dispatch by length has no
    prediction to act on; with 1, it has the true lengths."""


class EnvCosts(StateCosts):
    """Simulators, rendering included. On a device the environments of a chunk move together; on the host each moves in
    a process."""

    bound: Literal["device", "host"] = "device"
    """Resource that limits them: simulators that are bound by processor cores cannot be placed on devices."""

    chunks: tuple[tuple[int, float], ...] = Field(min_length=1)
    """(environments, seconds of a chunk in all of them), by rising number of environments; linear in between."""
    reset_s: float = Field(default=0.0, ge=0)
    """Seconds of a reset; on a device, of all environments that are reset together."""
    host_processes: int = Field(default=1, ge=1)
    """Processes that simulate at the same time on the host."""
    processes_per_device: int = Field(default=0, ge=0)
    """Such processes for each device of the cluster, if the host grows with it; 0: `host_processes` on any cluster."""

    @model_validator(mode="after")
    def _rising_numbers(self) -> Self:
        numbers = [number for number, _ in self.chunks]
        if numbers[0] < 1 or numbers != sorted(set(numbers)):
            raise ValueError(f"chunks needs 1 or more environments, each point more than the one before: {numbers}")
        return self

    def num_processes(self, num_devices: int) -> int:
        """Returns the number of processes on the host of a cluster."""
        return self.processes_per_device * num_devices or self.host_processes

    def chunk_s(self, num_envs: int) -> float:
        """Predicts a chunk in `num_envs` environments together; beyond the last point the last slope goes on."""
        return read_curve(self.chunks, num_envs)


class Turns(Config):
    """Course of an episode of several turns. How long each answer is, `lengths` says. Quantiles are at evenly spaced
    probabilities from 0 to 1."""

    turns: tuple[float, ...] = Field(min_length=1)
    """Quantiles of the turns of an episode."""
    given_tokens: tuple[float, ...] = Field(min_length=1)
    """Quantiles of the tokens that a later turn is given behind the one before: a tool's answer, a user's words."""
    tool_s: tuple[float, ...] = Field(min_length=1)
    """Quantiles of the seconds between two turns: the episode's own code and its tools."""
    reward: float = Field(default=0.5, ge=0, le=1)
    """Share of episodes that are right, where the episode brings the reward."""


class Interference(Config):
    """Cost of one worker's work to another that computes at the same time on another device: cores, memory, the GIL."""

    role: str
    """Role whose work takes longer."""
    beside: str
    """While an instance of this role works."""
    slowdown: float = Field(ge=1)
    """How many times as long."""


class RunSizes(Config):
    """Sizes of the run that a profile's lengths are of."""

    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=1)
    max_new_tokens: int = Field(ge=1)
    num_envs: int = Field(default=0, ge=0)
    """Environments of the simulators; 0 for a run without."""


class Profile(Config):
    """The costs of a recipe's workers on one kind of device."""

    device: str
    """Kind of device, for people: `cpu, one core of ...`."""
    basis: Literal["measured", "roofline"] = "measured"
    """Origin of the costs: workers that ran, or data sheets."""
    kind: str = Field(default="sim", pattern="[a-z][a-z0-9]*")
    """The same as the pool of a virtual cluster that placements name."""
    kinds: Mapping[str, "Profile"] = {}
    """Costs on the further kinds of devices of a mixed cluster, by pool; lengths, rewards and controller are the
    cluster's own."""
    model: str = ""
    """Model of the workers, as a recipe names it; empty where that was not noted."""
    sizes: RunSizes | None = None
    """Sizes of the run whose responses were measured, or that was assumed."""
    device_hour_cost: float = Field(default=0.0, ge=0)
    """Price of one device for an hour, in any currency; 0 where none is stated."""
    source: str = ""
    """Source of the figures: the command, or papers."""
    device_memory_bytes: int = Field(ge=1)
    links: Links | None = None
    """None: moving weights and samples takes no longer than `export_s` and `update_s` say; of a mixed cluster, those of
    its first profile count."""
    rollout: RolloutCosts
    actor: TrainCosts
    reference: InferenceCosts | None = None
    """None where it was not measured: the actor's inference serves."""
    critic: TrainCosts | None = None
    """None where it was not measured: the actor's costs serve."""
    reward: RewardCosts = RewardCosts()
    lengths: Lengths = Lengths()
    """Lengths of responses; with `turns`, of each turn's."""
    env: EnvCosts | None = None
    """None of a recipe whose episodes have no simulators."""
    turns: Turns | None = None
    """None of a recipe whose samples are one response each."""
    controller_sample_s: float = Field(default=0.0, ge=0)
    """Seconds of the controller for each sample, one after another: its way through channels, groups and batches."""
    controller_step_s: float = Field(default=0.0, ge=0)
    """Seconds of the controller for each step, in which the trainer waits: admission, the way from call to call."""
    interference: tuple[Interference, ...] = ()
    """Costs are those of a worker that works alone; pairs that are not named here leave each other alone."""

    @property
    def label(self) -> str:
        """Kind of device as it is shown: a roofline is called one wherever it is."""
        return f"{self.device} (roofline, not measured)" if self.basis == "roofline" else self.device

    def on(self, role: str, pools: Iterable[str]) -> StateCosts:
        """Returns a role's costs on devices of these pools; on several kinds at once, those of the slowest.

        Costs of another role serve where one was not measured.
        """
        profiles = [self.kinds.get(pool, self) for pool in dict.fromkeys(pools)] or [self]
        return max([profile.costs_of(role) for profile in profiles], key=lambda costs: costs.slowness)

    def costs_of(self, role: str) -> StateCosts:
        """Returns the costs of a role on this kind of device; those of another serve where it was not measured."""
        if role == "rollout":
            return self.rollout
        if role == "env" and self.env:
            return self.env
        if role == "reference":
            return self.reference or self.actor.inference
        return (self.critic or self.actor) if role == "critic" else self.actor

    def slowdown(self, role: str, beside: Iterable[str]) -> float:
        """Returns how many times as long a role's work takes while others work, one entry an instance. Costs add up."""
        pairs = {(pair.role, pair.beside): pair.slowdown - 1 for pair in self.interference}
        return 1 + sum(pairs.get((role, other), 0.0) for other in beside)
