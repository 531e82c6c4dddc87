"""The `Recipe`: all settings of one experiment. Each section is the config of the part that it configures."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, get_args

from pydantic import BeforeValidator, Field, SerializeAsAny, model_serializer, model_validator

from interlace.algorithms import Algorithm, AlgorithmConfig, create_algorithm, objective_names
from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.random import SEED_END
from interlace.core.recovery import RecoveryConfig
from interlace.core.types import SamplingParams
from interlace.data.config import DataConfig, MixtureSource, expand_source
from interlace.data.warmup import DemonstrationConfig
from interlace.engines.rollout.config import EngineConfig, NativeConfig
from interlace.engines.rollout.kinds import parse_engine
from interlace.engines.train.config import TOKENS_PER_MICROBATCH, ActorConfig, CriticConfig, OptimizerConfig
from interlace.models.config import ModelConfig, WorldModelSettings, by_path
from interlace.observe.best import BestConfig
from interlace.rewards.config import RewardConfig
from interlace.robots.replay.buffer import ReplayLearnerConfig
from interlace.rollouts.config import EpisodeConfig, parse_episode
from interlace.rollouts.rendering.config import RendererConfig
from interlace.run.recipe.algorithm_by_source import (
    AlgorithmBySource,
    SourceAlgorithm,
    check_algorithms,
    complete_algorithms,
    share_reward,
)
from interlace.run.recipe.sections import ClusterConfig, EvaluationConfig, LoggingConfig, ReferenceConfig, WarmupConfig
from interlace.runtime.gpu import has_gpu
from interlace.schedule.presets import bounding, bounds_of, load_schedule
from interlace.schedule.schedule import Schedule
from interlace.schedule.vocabulary import foreign_setting_hint, foreign_value_hint
from interlace.weights.config import WeightsConfig

DEFAULT_ALGORITHM = "grpo"
DEFAULT_SCHEDULE = "verl-colocated"
AUTO = "auto"


class AlgorithmChoice(Config):
    """An algorithm by name. Written as the name alone, or as `{name: ..., setting: value, ...}`."""

    name: str
    """A built-in algorithm, or your class as package.module:Class."""
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
    """A schedule: a preset with changed fields. Written as the name, or as `{preset: ..., field: value, ...}`."""

    preset: str
    """A built-in preset, the path of your YAML file, or `auto`, which lets the planner choose."""
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
        # With every field given, as in the config.yaml of a run, the preset's file is not needed: it may have changed.
        if set(Schedule.model_fields) <= set(flat):
            return {"preset": preset, "resolved": Schedule.parse(flat, where=f"schedule {preset}")}
        return {"preset": preset, "resolved": load_schedule(preset, flat)}

    @model_serializer
    def _flatten(self) -> Mapping[str, object]:
        fields = bounds_of(self.resolved) if self.open else self.resolved.model_dump(mode="json")
        return {"preset": self.preset, **fields}


SHORT: Mapping[str, Callable[[str], dict[str, object]]] = {
    "model": by_path,
    "task": expand_source,
    "algorithm": lambda name: {"name": name},
    "schedule": lambda name: {"preset": name},
    "cluster": lambda name: {"backend": name},
    "reward": lambda name: {"name": name},
    "rollout": lambda name: {"engine": name},
    "episode": lambda name: {"name": name},
    "best": lambda name: {"metric": name},
}
"""Sections that may be written as one word, each with a function that expands the word."""


def _expand_section(section: str) -> BeforeValidator:
    def spell_out(value: object) -> object:
        if not isinstance(value, str):
            return value
        if hint := foreign_value_hint(section, value):
            raise UserError(f"unknown {section} {value!r}. {hint}")
        return SHORT[section](value)

    return BeforeValidator(spell_out)


class TaskSource(MixtureSource):
    """A source of a mixture, with its reward and its algorithm."""

    reward: Annotated[RewardConfig | None, _expand_section("reward")] = None
    """Scorer of responses to the source's prompts. If None, the recipe's `reward`."""
    algorithm: AlgorithmChoice | None = None
    """Filters, advantages and loss of the source's samples. Without `name`, the recipe's `algorithm` with changed
    settings. If None, the recipe's `algorithm`."""

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        if self.reward is not None and self.reward.model is not None:
            raise ValueError("a reward model scores the prompts of all sources: set it as the recipe's `reward`")
        return self


class TaskConfig(DataConfig):
    """Prompts to train on and held-out prompts."""

    demonstrations: DemonstrationConfig | None = None
    """Writer of the completions of generated prompts, for sft, dpo and reward_model; None takes the answers."""
    mixture: tuple[TaskSource, ...] = ()
    """Sources whose prompts are drawn by weight, instead of a single source."""

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
    """One experiment. A *step* is one iteration of the loop; a *version* is one publication of weights."""

    model: Annotated[ModelConfig, _expand_section("model")]
    task: Annotated[TaskConfig, _expand_section("task")]
    """Prompts to train on and held-out prompts."""
    reward: Annotated[RewardConfig | None, _expand_section("reward")] = None
    """Scorer of responses. None if the episode gives the reward. A source of a mixture may have another reward."""
    episode: Annotated[SerializeAsAny[EpisodeConfig], BeforeValidator(parse_episode), _expand_section("episode")] = (
        EpisodeConfig()
    )
    """Production of a sample. Written as the episode's name, or as `{name: ..., setting: value, ...}`."""
    renderer: RendererConfig = RendererConfig()
    """Conversion of messages to tokens and back, for episodes that work on messages."""
    algorithm: AlgorithmChoice = Field(default_factory=lambda: AlgorithmChoice.model_validate({}))
    schedule: ScheduleChoice = Field(default_factory=lambda: ScheduleChoice.model_validate({}))
    cluster: Annotated[ClusterConfig, _expand_section("cluster")] = ClusterConfig()
    steps: int = Field(ge=1)
    seed: int = Field(default=0, ge=0, lt=SEED_END)
    """Seed of sampling, of the order of prompts, and of the warm-up. `model.seed` is the seed of a tiny model's initial
    weights."""
    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=1)
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per step and pass; prompts_per_step is divided among them."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's samples, as in PPO. Later passes take prompts in another order, keyed by step and pass, and
    train on the advantages and old log-probs of the first pass."""
    tokens_per_microbatch: int = Field(default=TOKENS_PER_MICROBATCH, ge=1)
    """Prompt and response tokens of one forward pass in training. Changes memory and speed, but not the result."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints. With 0, only one checkpoint at the end."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on held-out prompts. With 0, only before the first step and after the last. With
    `schedule.sync_every` above 1, an evaluation that falls due between two publications follows with the next one."""
    keep_checkpoints: Annotated[int, BeforeValidator(_refuse_foreign_value("keep_checkpoints"))] = Field(
        default=2, ge=1
    )
    """Number of newest checkpoints to keep."""
    best: Annotated[BestConfig | None, _expand_section("best")] = None
    """Checkpoint to keep in addition, by a metric, and early stopping. If None, only the newest are kept."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Limits of recovery from failures of processes and samples."""
    sampling: SamplingParams = SamplingParams()
    optimizer: Annotated[OptimizerConfig, BeforeValidator(_refuse_foreign_value("optimizer"))] = OptimizerConfig()
    """Optimizer of the actor."""
    rollout: Annotated[SerializeAsAny[EngineConfig], BeforeValidator(parse_engine), _expand_section("rollout")] = (
        NativeConfig()
    )
    """The engine that generates. Written as its name, or as `{engine: ..., setting: value, ...}`."""
    actor: ActorConfig = ActorConfig()
    weights: WeightsConfig = WeightsConfig()
    """Transfer of new weights from the actor to the engines."""
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    warmup: WarmupConfig | None = None
    replay: ReplayLearnerConfig | None = None
    """Replay of stored trajectories. If None, each trajectory is trained on once."""
    world_model: WorldModelSettings | None = None
    """Model of a robot's simulators, trained on the replay, for `episode.imagined`. If None, no such model."""
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="before")
    @classmethod
    def _complete_sources(cls, data: object) -> object:
        """Shares rewards and algorithms between the recipe and the sources of a mixture."""
        return complete_algorithms(share_reward(data))

    @model_validator(mode="after")
    def _check_algorithms(self) -> Self:
        """Raises UserError for algorithms of sources that cannot train together."""
        check_algorithms((self.algorithm.name, _create(self.algorithm)), list_algorithms(self))
        return self

    @model_validator(mode="before")
    @classmethod
    def _take_rows_once(cls, data: object) -> object:
        """Sets samples_per_prompt to 1 if it is not given and the algorithm trains on given rows."""
        if not isinstance(data, Mapping) or "samples_per_prompt" in data:
            return data
        chosen = data.get("algorithm")
        name = chosen.get("name") if isinstance(chosen, Mapping) else chosen
        return {**data, "samples_per_prompt": 1} if name in objective_names() else data

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
        """Returns advice on an unknown key: the equivalent of another system's setting, or sections with the key."""
        if hint := foreign_setting_hint(key):
            return hint
        if key in setting_keys(cls):  # a program's keyword **{"optimizer.lr": 1e-4}
            section, *rest = key.split(".")
            return f"In Python a section is a dictionary: {section}={_nest(rest)}."
        places = [found for found in setting_keys(cls) if found.endswith(f".{key}")]
        return f"{key!r} is a key of other sections: {', '.join(places[:4])}." if places else None


def _nest(names: Sequence[str]) -> str:
    """Returns the dictionary of a key in Python, such as {'files': {'train': ...}}."""
    return f"{{{names[0]!r}: {_nest(names[1:])}}}" if names else "..."


def _is_on_gpus(cluster: object) -> bool:
    """Returns whether the devices of an unparsed section `cluster` are GPUs."""
    devices = cluster.devices if isinstance(cluster, ClusterConfig) else "auto"
    if isinstance(cluster, Mapping):
        devices = str(cluster.get("devices", "auto"))
    return "cuda" in devices or (devices == "auto" and has_gpu())


def setting_keys(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of all settings below a config."""
    for name, field in cls.model_fields.items():
        inner = [part for part in _configs_in(field.annotation) if part is not cls]  # episode.others contains episodes
        if not inner:
            yield prefix + name
        for part in inner:
            yield from setting_keys(part, f"{prefix}{name}.")


def _configs_in(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [found for arg in get_args(annotation) for found in _configs_in(arg)]


def _create(choice: AlgorithmChoice) -> Algorithm:
    return create_algorithm(choice.name, choice.settings.model_dump())


def list_algorithms(recipe: Recipe) -> list[SourceAlgorithm]:
    """Returns the algorithm of each source of a mixture, or the recipe's alone if no source names one.

    Sources with equal settings have the same object.
    """
    sources = recipe.task.mixture if any(source.algorithm for source in recipe.task.mixture) else ()
    choices = {source.label: source.algorithm or recipe.algorithm for source in sources} or {"": recipe.algorithm}
    made = [(choice, _create(choice)) for choice in choices.values()]
    return [
        SourceAlgorithm(
            source=source, name=choice.name, algorithm=next(algorithm for each, algorithm in made if each == choice)
        )
        for source, choice in choices.items()
    ]


def algorithm_of(recipe: Recipe) -> Algorithm:
    """Returns the recipe's algorithm."""
    found = list_algorithms(recipe)
    if not found[0].source:
        return found[0].algorithm
    return AlgorithmBySource(_create(recipe.algorithm), found)


def list_rewards(recipe: Recipe) -> list[RewardConfig]:
    """Returns the rewards of single sources, and the recipe's own if it has one."""
    return [*recipe.task.rewards.values(), *([recipe.reward] if recipe.reward else [])]


def is_offline(recipe: Recipe) -> bool:
    """Returns whether the recipe trains on given rows, without a policy that generates."""
    return algorithm_of(recipe).rows is not None


def _as_mapping(section: str, data: object) -> dict[str, Any]:
    if isinstance(data, str):
        return SHORT[section](data)
    if isinstance(data, Mapping):
        return dict(data)
    [key] = SHORT[section]("")
    form = " A class is named as package.module:Class." if inspect.isclass(data) else ""
    raise UserError(f"{section} = {data!r}: write a name, or a mapping with `{key}` and the settings to change.{form}")


def _name(section: str, key: str, value: object) -> str:
    """Returns a name. Raises UserError for another type, and for a name of another system."""
    if not isinstance(value, str):
        raise UserError(f"{section}.{key} = {value!r}: write a name.")
    if hint := foreign_value_hint(section, value):
        raise UserError(f"unknown {section} {value!r}. {hint}")
    return value


def set_schedule(recipe: Recipe, schedule: Schedule, name: str = "planned") -> Recipe:
    """Returns the recipe with another schedule. name: the name of the preset to show."""
    return recipe.model_copy(update={"schedule": ScheduleChoice(preset=name, resolved=schedule)})
