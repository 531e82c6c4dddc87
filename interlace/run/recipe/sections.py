"""Sections of a recipe that belong to no part: cluster, reference, warm-up, evaluation, logging."""

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from interlace.core.config import Config
from interlace.core.errors import UserError, nearest
from interlace.core.plugins import builtin_names
from interlace.core.types import MIN_TEMPERATURE
from interlace.data.warmup import DemonstrationConfig
from interlace.engines.rollout.config import EngineConfig
from interlace.engines.rollout.kinds import parse_engine
from interlace.engines.train.config import OptimizerConfig
from interlace.models.config import ModelConfig, by_path
from interlace.robots.experts import ExpertConfig
from interlace.run import clusters
from interlace.runtime.machine import read_counts

_ADDRESS = re.compile(r"(ray://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}")


class ClusterConfig(Config):
    """Cluster that the run uses. Written as the back end's name, or as `{backend: ..., devices: ...}`."""

    backend: str = "local"
    """local: this process. ray: processes that Ray places, on one or more machines. Your own: package.module:Name."""
    devices: str = "auto"
    """auto: every GPU, or a device for each CPU core. Else the number of devices by kind: `cpu:2`, `cuda:1,cpu:4`."""
    address: str | None = None
    """For ray: address of a cluster to join, `auto` or host:port. If None, the run starts Ray on this machine."""
    threads_per_worker: int | None = Field(default=None, ge=1)
    """Threads of a rank's CPU operations. If None, one thread for a small model, whose threads would wait longer than
    they compute; otherwise one thread for each device of the rank. The order of sums depends on the number of threads:
    with 1, weights are bit-identical under every placement."""
    hang_after_s: float = Field(default=1800.0, gt=0)
    """Seconds without progress after which the run ends with an error that contains the wait-for graph, or starts again
    if a rank with a process is the cause."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """For ray: seconds for Ray to start a process. If a rank is not started by then, its node may be gone, and the run
    starts again on the nodes that are left."""

    @property
    def is_ray(self) -> bool:
        """Returns whether each rank is a process of Ray."""
        return self.backend == "ray"

    @field_validator("devices", mode="before")
    @classmethod
    def _refuse_number(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            raise UserError(f"cluster.devices = {value}: name the kind of the devices, as cpu:{value} or cuda:{value}.")
        return value

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if ":" not in self.backend and self.backend not in builtin_names(clusters):
            hint = nearest(self.backend, builtin_names(clusters))
            virtual = " For the virtual clock: `interlace simulate`, or `interlace compare --cluster sim`."
            raise UserError(f"cluster.backend = {self.backend!r}: there is no such back end.{hint}{virtual}")
        if ":" not in self.backend and self.devices != "auto":
            read_counts(self.devices)  # refused here, before the back end joins or starts a cluster
        address = self.address
        if address is not None and address not in ("auto", "local") and not _ADDRESS.fullmatch(address):
            raise UserError(
                f"cluster.address = {address!r} is not an address of a Ray cluster: write host:port, such as "
                f"{address.split('/')[-1].rstrip(':') or '10.0.0.1'}:6379, or auto for the cluster of this machine."
            )
        return self


def _parse_service(value: object) -> object:
    return parse_engine({"engine": value} if isinstance(value, str) else value, where="reference.service")


class ReferenceConfig(Config):
    """The policy to which the KL is measured, if the algorithm needs one."""

    model: Annotated[ModelConfig, BeforeValidator(by_path)] | None = None
    """A model other than the initial policy, with the same vocabulary unless `align` is text."""
    service: Annotated[SerializeAsAny[EngineConfig] | None, BeforeValidator(_parse_service)] = None
    """Engine service that computes the reference's log-probs, written as `rollout`: `{engine: address, urls: [...]}`,
    or `interlace`, `vllm`, `sglang` for servers that the run starts. If None, a rank of the run computes them."""
    ensemble: tuple[Annotated[ModelConfig, BeforeValidator(by_path)], ...] = ()
    """Further teachers of `distill`, of the same vocabulary; the teacher is the mean of their probabilities."""
    context: str = ""
    """Text before the prompt that the reference alone reads. Braces name `answer` or a column of the row:
    "The answer is {answer}. " gives the teacher of `distill` an advantage over the policy."""
    align: Literal["tokens", "text"] = "tokens"
    """tokens: the reference has the policy's vocabulary. text: a teacher of `distill` with another tokenizer reads the
    text of a response, and groups of tokens with equal text share its log-prob."""

    @property
    def is_initial_policy(self) -> bool:
        """Returns whether the reference is the initial policy, reading what the policy reads."""
        return self.model is None and self.service is None and not self.ensemble and not self.context


class WarmupCriterion(Config):
    """End of a warm-up by measured accuracy, so that training starts from the same point on every processor.

    The measure is the accuracy of the demonstrated habit on held-out prompts: the share of demonstrations in which
    the model's most likely token is the demonstrated one wherever the demonstration is determined.
    """

    accuracy: float = Field(gt=0.0, le=1.0)
    """Accuracy at which the warm-up ends."""
    check_every: int = Field(default=25, ge=1)
    """Steps between two measurements, after the first at `warmup.steps`."""
    max_steps: int = Field(ge=1)
    """Limit of the steps. A warm-up that has not reached the accuracy at this step ends the run with an error."""
    num_examples: int = Field(default=128, ge=1)
    """Held-out demonstrations of a measurement."""


class WarmupConfig(Config):
    """Supervised fine-tuning on written examples before step 0; its result is cached by content."""

    steps: int = Field(ge=1)
    """Steps; with `until`, the steps before the first measurement."""
    until: WarmupCriterion | None = None
    """Criterion that ends the warm-up. If None, the warm-up ends after `steps`."""
    batch_size: int = Field(default=64, ge=1)
    """Examples per step."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    experts: ExpertConfig | None = None
    """Demonstrations of a robot's simulator, instead of written ones."""

    @model_validator(mode="after")
    def _check_max_steps(self) -> Self:
        if self.until and self.until.max_steps < self.steps:
            raise ValueError(
                f"warmup.until.max_steps = {self.until.max_steps} is below warmup.steps = {self.steps}: raise it, or "
                "set warmup.until=null"
            )
        if self.until and self.experts:
            raise ValueError("warmup.until measures written demonstrations, not experts: set warmup.until=null")
        return self


def _to_list(value: object) -> object:
    return [value] if isinstance(value, int) else value


class EvaluationConfig(Config):
    """Evaluation on held-out prompts: once greedily, and by sampling."""

    num_prompts: int | None = Field(default=None, ge=1)
    """Number of held-out prompts to use, the first ones. If None, all."""
    samples_per_prompt: int = Field(default=1, ge=0)
    """Sampled answers to each prompt. With 0, only greedy answers."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE)
    """Temperature of the sampled answers."""
    pass_at: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_to_list)] = ()
    """Values of k for pass@k, the probability that one of k sampled answers is right. Each is at most
    samples_per_prompt."""
    resamples: int = Field(default=1000, ge=0)
    """Resamples of the prompts for the 95 % intervals of `interlace eval`. With 0, no intervals."""
    num_shown: int = Field(default=4, ge=0)
    """Prompts whose answers before and after training are printed. With 0, no episode of a robot is filmed."""
    filmed: Literal["outcome", "first"] = "outcome"
    """Greedy held-out episodes of a robot that are filmed. `outcome`: the best, the worst and a random failure, which
    are run once more for the film. `first`: the first `num_shown`."""

    @field_validator("pass_at")
    @classmethod
    def _in_order(cls, pass_at: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(pass_at)))

    @model_validator(mode="after")
    def _check_pass_at(self) -> Self:
        if self.pass_at and self.pass_at[-1] > self.samples_per_prompt:
            raise ValueError(
                f"pass@{self.pass_at[-1]} needs {self.pass_at[-1]} sampled answers to each prompt, and "
                f"samples_per_prompt is {self.samples_per_prompt}: raise it, or lower pass_at"
            )
        return self


def _make_list(value: object) -> object:
    """Turns a single name into a list of one; `none` and an empty text into an empty list."""
    if not isinstance(value, str):
        return value
    return [name.strip() for name in value.split(",") if name.strip() and name.strip() != "none"]


class LoggingConfig(Config):
    """Loggers that receive the metrics in addition to metrics.jsonl."""

    loggers: Annotated[tuple[str, ...] | None, BeforeValidator(_make_list)] = None
    """Names, or your classes as package.module:Name; a single name needs no list. If None, TensorBoard if it is
    installed."""
    project: str | None = None
    """Project (W&B, Trackio) or experiment (MLflow). If None, WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME
    of the environment, else `interlace`."""
    name: str | None = None
    """Name of the run at the logging service. If None, the name of the run's folder."""
    timeline: bool = True
    """True writes timeline.json. The goodput ledger does not depend on this file."""
    trace_steps: tuple[int, int] | None = None
    """First and last step that torch's profiler records in every process, e.g. [10, 12]. If None, no step."""

    @field_validator("trace_steps")
    @classmethod
    def _check_order(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps and not 1 <= steps[0] <= steps[1]:
            raise ValueError(f"{list(steps)} is no range of steps: give the first and the last, as [10, 12]")
        return steps
