"""The `Recipe`: one experiment, whole. Every section is the configuration of the part it configures."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Self, get_args

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_serializer, model_validator

from interlace.algorithms import Algorithm, AlgorithmConfig, create_algorithm
from interlace.core.config import Config
from interlace.core.errors import UserError, nearest
from interlace.core.plugins import builtin_names
from interlace.core.random import SEED_END
from interlace.core.recovery import RecoveryConfig
from interlace.core.types import MIN_TEMPERATURE, SamplingParams
from interlace.data.config import DataConfig, MixtureSource, expand_source
from interlace.data.warmup import DemonstrationConfig
from interlace.engines.rollout.config import EngineConfig, NativeConfig
from interlace.engines.rollout.kinds import parse_engine
from interlace.engines.train.config import TOKENS_PER_MICROBATCH, ActorConfig, CriticConfig, OptimizerConfig
from interlace.models.config import ModelConfig, WorldModelSettings, by_path
from interlace.rewards.base import RewardConfig
from interlace.robots.experts import ExpertConfig
from interlace.robots.replay.buffer import ReplayLearnerConfig
from interlace.rollouts.config import EpisodeConfig, parse_episode
from interlace.rollouts.rendering.config import RendererConfig
from interlace.run import clusters
from interlace.runtime.gpu import has_gpu
from interlace.schedule.auto_schedule import bounding, bounds_of
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from interlace.schedule.vocabulary import foreign_setting_hint, foreign_value_hint
from interlace.weights.config import WeightsConfig

DEFAULT_ALGORITHM = "grpo"
DEFAULT_SCHEDULE = "verl-colocated"
AUTO = "auto"
_ADDRESS = re.compile(r"(ray://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}")


class AlgorithmChoice(Config):
    """An algorithm by name. Written as the name alone, or `{name: ..., setting: value, ...}`."""

    name: str
    """A built-in, or your own as package.module:Class."""
    settings: SerializeAsAny[AlgorithmConfig]

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: object) -> object:
        """Raises UserError for an unknown name or setting."""
        flat = _as_mapping("algorithm", data)
        if "settings" in flat:
            return flat
        name = _name("algorithm", "name", flat.pop("name", DEFAULT_ALGORITHM))
        return {"name": name, "settings": create_algorithm(name, flat).settings}

    @model_serializer
    def _flatten(self) -> Mapping[str, object]:
        return {"name": self.name, **self.settings.model_dump(mode="json")}


class ScheduleChoice(Config):
    """A schedule: a preset by name, some fields changed. Written as the name, or `{preset: ..., field: value, ...}`."""

    preset: str
    """A shipped one, the path of your own YAML file, or `auto`: the planner chooses."""
    open: bool = False
    """True until the planner has chosen; `resolved` then only bounds the staleness."""
    resolved: Schedule
    """The schedule with all changes. Only the runtime reads its fields."""

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: object) -> object:
        """Raises UserError for an unknown preset or field."""
        flat = _as_mapping("schedule", data)
        if "resolved" in flat:
            return flat
        preset = _name("schedule", "preset", flat.pop("preset", DEFAULT_SCHEDULE))
        if preset == AUTO and not set(Schedule.model_fields) <= set(flat):
            return {"preset": preset, "open": True, "resolved": bounding(flat)}
        # With every field given, as in the config.yaml of a run, the preset's file may have changed or gone since.
        if set(Schedule.model_fields) <= set(flat):
            return {"preset": preset, "resolved": Schedule.parse(flat, where=f"schedule {preset}")}
        return {"preset": preset, "resolved": load_schedule(preset, flat)}

    @model_serializer
    def _flatten(self) -> Mapping[str, object]:
        fields = bounds_of(self.resolved) if self.open else self.resolved.model_dump(mode="json")
        return {"preset": self.preset, **fields}


class ClusterConfig(Config):
    """Cluster that the run computes on. Written as the back end's name, or `{backend: ..., devices: ...}`."""

    backend: str = "local"
    """local: this process. ray: processes that Ray places, on one machine or many. Your own: package.module:Name."""
    devices: str = "auto"
    """auto: every GPU, or a device for each CPU core. Else how many of which kind: `cpu:2`, `cuda:1,cpu:4`."""
    address: str | None = None
    """ray: of a running cluster to join, `auto` or host:port; without it one is started on this machine for the run."""
    threads_per_worker: int | None = Field(default=None, ge=1)
    """Threads of a rank's CPU operations. None takes one thread for a small model, on which several threads wait for
    each other longer than they compute, and one thread for each device of the rank otherwise. Sums are taken in an
    order that depends on the number of threads: with 1, weights are equal to the bit under every placement."""
    hang_after_s: float = Field(default=1800.0, gt=0)
    """Seconds without progress after which the run ends with an error that contains the wait-for graph."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if ":" not in self.backend and self.backend not in builtin_names(clusters):
            hint = nearest(self.backend, builtin_names(clusters))
            virtual = " For the virtual clock: interlace simulate, or interlace compare --cluster sim."
            raise UserError(f"cluster.backend = {self.backend!r}: there is no such back end.{hint}{virtual}")
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
    """The policy that KL is measured to, if the algorithm needs one."""

    model: Annotated[ModelConfig, BeforeValidator(by_path)] | None = None
    """Another than the initial policy; it must share its vocabulary."""
    service: Annotated[SerializeAsAny[EngineConfig] | None, BeforeValidator(_parse_service)] = None
    """Engine service that computes its log-probs, as `rollout` names engines: `{engine: address, urls: [...]}`, or
    `interlace`, `vllm`, `sglang` for servers that the run starts. None: a rank of the run computes them."""


class WarmupCriterion(Config):
    """End of a warm-up by what the model has learned, so that training starts from the same point on every processor.

    The measure is the accuracy of the demonstrated habit on held-out prompts: the share of demonstrations in which
    the model's most likely token is the demonstrated one wherever the demonstration is determined.
    """

    accuracy: float = Field(gt=0.0, le=1.0)
    """Accuracy at which the warm-up ends."""
    check_every: int = Field(default=25, ge=1)
    """Steps between two measurements, after the first one at `warmup.steps`."""
    max_steps: int = Field(ge=1)
    """Limit of the steps. A warm-up that has not reached the accuracy by then ends the run with an error."""
    num_examples: int = Field(default=128, ge=1)
    """Held-out demonstrations of a measurement."""


class WarmupConfig(Config):
    """Supervised fine-tuning on written examples before step 0; its result is cached by content."""

    steps: int = Field(ge=1)
    """Steps; with `until`, the steps before the first measurement."""
    until: WarmupCriterion | None = None
    """Criterion that ends the warm-up. None ends it after `steps`."""
    batch_size: int = Field(default=64, ge=1)
    """Examples a step."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    experts: ExpertConfig | None = None
    """Demonstrations of a robot's simulator, instead of written ones."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.until and self.until.max_steps < self.steps:
            raise ValueError(
                f"warmup.until.max_steps = {self.until.max_steps} is below warmup.steps = {self.steps}: raise it, or "
                "set warmup.until=null"
            )
        if self.until and self.experts:
            raise ValueError("warmup.until measures written demonstrations, not experts: set warmup.until=null")
        return self


class EvaluationConfig(Config):
    """How held-out prompts are judged: once greedily, and by samples."""

    num_prompts: int | None = Field(default=None, ge=1)
    """Number of the task's held-out prompts to use, the first ones; None takes all."""
    samples_per_prompt: int = Field(default=1, ge=0)
    """Sampled answers to each prompt; 0 leaves greedy decoding alone."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE)
    """Temperature of the sampled answers."""
    num_shown: int = Field(default=4, ge=0)
    """Prompts whose answers before and after are printed; a robot's episodes are filmed."""


def _listed(value: object) -> object:
    """Turns a single name into a list of one; `none` and an empty text into an empty list."""
    if not isinstance(value, str):
        return value
    return [name.strip() for name in value.split(",") if name.strip() and name.strip() != "none"]


class LoggingConfig(Config):
    """Loggers that receive the metrics in addition to metrics.jsonl."""

    loggers: Annotated[tuple[str, ...] | None, BeforeValidator(_listed)] = None
    """Names, or your own as package.module:Name; a single name needs no list. None takes TensorBoard if it is
    installed."""
    project: str | None = None
    """Project (W&B, Trackio) or experiment (MLflow). None takes WANDB_PROJECT, TRACKIO_PROJECT or
    MLFLOW_EXPERIMENT_NAME of the environment, else `interlace`."""
    name: str | None = None
    """Name of the run at the service. None takes the name of the run's folder."""
    timeline: bool = True
    """True writes timeline.json. The goodput ledger does not depend on this file."""
    trace_steps: tuple[int, int] | None = None
    """First and last step that torch's profiler records in every process, e.g. [10, 12]; None records none."""

    @field_validator("trace_steps")
    @classmethod
    def _check_order(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps and not 1 <= steps[0] <= steps[1]:
            raise ValueError(f"{list(steps)} is no range of steps: give the first and the last, as [10, 12]")
        return steps


SHORT: Mapping[str, Callable[[str], dict[str, object]]] = {
    "model": by_path,
    "task": expand_source,
    "algorithm": lambda name: {"name": name},
    "schedule": lambda name: {"preset": name},
    "cluster": lambda name: {"backend": name},
    "reward": lambda name: {"name": name},
    "rollout": lambda name: {"engine": name},
    "episode": lambda name: {"name": name},
}
"""Sections that may be written as one word, each with a function that expands the word."""


def _spelled_out(section: str) -> BeforeValidator:
    def spell_out(value: object) -> object:
        if not isinstance(value, str):
            return value
        if hint := foreign_value_hint(section, value):
            raise UserError(f"unknown {section} {value!r}. {hint}")
        return SHORT[section](value)

    return BeforeValidator(spell_out)


class TaskSource(MixtureSource):
    """A source of a mixture, with its reward."""

    reward: Annotated[RewardConfig | None, _spelled_out("reward")] = None
    """Scorer of responses to its prompts; None takes the recipe's `reward`."""

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        if self.reward is not None and self.reward.model is not None:
            raise ValueError("a reward model scores the prompts of all sources: set it as the recipe's `reward`")
        return self


class TaskConfig(DataConfig):
    """Prompts to train on and held-out prompts."""

    mixture: tuple[TaskSource, ...] = ()
    """Sources whose prompts are drawn by weight; in place of a single source."""

    @property
    def rewards(self) -> Mapping[str, RewardConfig]:
        """Returns the rewards of single sources, by the name of the source."""
        return {source.label: source.reward for source in self.mixture if source.reward is not None}


def _refuse_foreign_value(section: str) -> Callable[[object], object]:
    def refuse(value: object) -> object:
        if isinstance(value, str) and (hint := foreign_value_hint(section, value)):
            raise ValueError(hint.rstrip("."))
        return value

    return refuse


class Recipe(Config):
    """One experiment. A *step* is one turn of the loop; a *version* is one publication of weights."""

    model: Annotated[ModelConfig, _spelled_out("model")]
    task: Annotated[TaskConfig, _spelled_out("task")]
    """Prompts to train on and held-out prompts."""
    reward: Annotated[RewardConfig | None, _spelled_out("reward")] = None
    """Scorer of a response; None if the episode gives the reward. A source of a mixture may have another reward."""
    episode: Annotated[SerializeAsAny[EpisodeConfig], BeforeValidator(parse_episode), _spelled_out("episode")] = (
        EpisodeConfig()
    )
    """How a sample comes to be. Written as its name, or `{name: ..., setting: value, ...}`."""
    renderer: RendererConfig = RendererConfig()
    """Conversion of messages to tokens and back, for episodes that work on messages."""
    algorithm: AlgorithmChoice = Field(default_factory=lambda: AlgorithmChoice.model_validate({}))
    schedule: ScheduleChoice = Field(default_factory=lambda: ScheduleChoice.model_validate({}))
    cluster: Annotated[ClusterConfig, _spelled_out("cluster")] = ClusterConfig()
    steps: int = Field(ge=1)
    seed: int = Field(default=0, ge=0, lt=SEED_END)
    """Seed of sampling, of the order of prompts, and of warm-up."""
    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=1)
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates a step, of each pass; prompts_per_step is divided among them."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's samples, as PPO makes them: those after the first take prompts in another order, keyed by
    step and pass, and train on the advantages and old log-probs of the first."""
    tokens_per_microbatch: int = Field(default=TOKENS_PER_MICROBATCH, ge=1)
    """Prompt and response tokens of one forward of training. Changes memory and speed, never the result."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps; 0 writes one at the end only."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on held-out prompts; 0 evaluates before the first step and after the last only."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints that stay, the newest ones."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Limits of recovery from failures of processes and samples."""
    sampling: SamplingParams = SamplingParams()
    optimizer: Annotated[OptimizerConfig, BeforeValidator(_refuse_foreign_value("optimizer"))] = OptimizerConfig()
    """Optimizer of the actor."""
    rollout: Annotated[SerializeAsAny[EngineConfig], BeforeValidator(parse_engine), _spelled_out("rollout")] = (
        NativeConfig()
    )
    """The engine that generates. Written as its name, or `{engine: ..., setting: value, ...}`."""
    actor: ActorConfig = ActorConfig()
    weights: WeightsConfig = WeightsConfig()
    """Publication: how new weights travel from the actor to the engines."""
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    warmup: WarmupConfig | None = None
    replay: ReplayLearnerConfig | None = None
    """Trajectories that are learnt from again; None: each is trained on once."""
    world_model: WorldModelSettings | None = None
    """Model of a robot's simulators that is fitted to the replay, for `episode.imagined`; None: there is none."""
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="before")
    @classmethod
    def _share_reward(cls, data: object) -> object:
        """Takes the first source's reward as the recipe's if all sources of a mixture have one."""
        if not isinstance(data, Mapping) or data.get("reward") is not None:
            return data
        task = data.get("task")
        parts = task.get("mixture") if isinstance(task, Mapping) else task
        if not isinstance(parts, list | tuple) or not parts:
            return data
        if not all(isinstance(part, Mapping) and part.get("reward") is not None for part in parts):
            return data
        return {**data, "reward": parts[0]["reward"]}

    @model_validator(mode="before")
    @classmethod
    def _choose_dtype(cls, data: object) -> object:
        """Sets model.dtype to bfloat16 if it is not given and the run computes on GPUs."""
        if not isinstance(data, Mapping) or not _is_on_gpus(data.get("cluster")):
            return data
        model = data.get("model")
        if isinstance(model, ModelConfig):
            model = model.model_dump(exclude_unset=True)
        model = by_path(model)
        return {**data, "model": {"dtype": "bfloat16", **model}} if isinstance(model, Mapping) else data

    @classmethod
    def advice(cls, key: str) -> str | None:
        """Returns the setting that an unknown key stands for in another system, or the sections that have the key."""
        if hint := foreign_setting_hint(key):
            return hint
        places = [found for found in setting_keys(cls) if found.endswith(f".{key}")]
        return f"{key!r} is a key of other sections: {', '.join(places[:4])}." if places else None


def _is_on_gpus(cluster: object) -> bool:
    """Returns whether the devices of an unparsed section `cluster` are GPUs."""
    devices = cluster.devices if isinstance(cluster, ClusterConfig) else "auto"
    if isinstance(cluster, Mapping):
        devices = str(cluster.get("devices", "auto"))
    return "cuda" in devices or (devices == "auto" and has_gpu())


def setting_keys(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of all settings below a config."""
    for name, field in cls.model_fields.items():
        inner = [part for part in _configs_in(field.annotation) if part is not cls]  # episode.others has episodes
        if not inner:
            yield prefix + name
        for part in inner:
            yield from setting_keys(part, f"{prefix}{name}.")


def _configs_in(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [found for arg in get_args(annotation) for found in _configs_in(arg)]


def algorithm_of(recipe: Recipe) -> Algorithm:
    """Returns the recipe's algorithm."""
    choice = recipe.algorithm
    return create_algorithm(choice.name, choice.settings.model_dump())


def _as_mapping(section: str, data: object) -> dict[str, Any]:
    if isinstance(data, str):
        return SHORT[section](data)
    if isinstance(data, Mapping):
        return dict(data)
    [key] = SHORT[section]("")
    raise UserError(f"{section} = {data!r}: write a name, or a mapping with `{key}` and what is to be changed.")


def _name(section: str, key: str, value: object) -> str:
    """Returns a name. Raises UserError for another type, and for a name of another system."""
    if not isinstance(value, str):
        raise UserError(f"{section}.{key} = {value!r}: write a name.")
    if hint := foreign_value_hint(section, value):
        raise UserError(f"unknown {section} {value!r}. {hint}")
    return value


def set_schedule(recipe: Recipe, schedule: Schedule, name: str = "planned") -> Recipe:
    """Returns the recipe with another schedule. name: the preset's name that the run shows."""
    return recipe.model_copy(update={"schedule": ScheduleChoice(preset=name, resolved=schedule)})
