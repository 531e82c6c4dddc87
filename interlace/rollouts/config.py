"""Settings of a recipe's `episode`, and the kinds of episodes by name. Imports no torch.

Built-in episodes are modules of the packages in FOLDERS.
"""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, JsonValue, SerializeAsAny, model_validator

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.messages import ToolSpec
from interlace.core.plugins import class_names, find_class, load_object, unknown_name
from interlace.models.action_tokens import ActionTokens
from interlace.rollouts.base import Episode

SINGLE = "single_turn"
FOLDERS = ("interlace.rollouts.episodes", "interlace.agents.episodes", "interlace.robots.episodes")
"""Packages of the built-in episodes: a module that defines a concrete subclass of EpisodeKind is one."""


class EpisodeConfig(Config):
    """Settings of every episode, written as `{name: ..., setting: value, ...}` or as the name only."""

    name: str = SINGLE
    """Name of a built-in, or your own as package.module:Name."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of an episode's code and tools, in seconds, without the time of turns and simulators. Afterwards its
    sample fails. The time of further simulators that an episode leases at once counts."""
    max_turns: int = Field(default=64, ge=1)
    """Maximum number of turns of an episode. A request for another turn fails its sample. The episodes `tools`
    and `environment` (of your own class) end after their last turn instead."""
    workers: int = Field(default=0, ge=0)
    """Number of processes that run episodes, so that their code does not delay the run. If 0, episodes run in the
    controller. With Ray the processes may be on any node. A process that ends is replaced, and its samples start
    again."""
    column: str | None = None
    """Column of the data that names the episode of a row among `others`. A row without a value has this episode."""
    others: "dict[str, Annotated[SerializeAsAny[EpisodeConfig], BeforeValidator(parse_episode)]]" = Field(
        default_factory=dict
    )
    """Further episodes, by the value of `column` that selects them, each with separate settings."""

    @model_validator(mode="after")
    def _check_column(self) -> Self:
        if bool(self.others) != (self.column is not None):
            raise ValueError(
                f"column = {self.column!r} and others = {sorted(self.others)}: a row names one of `others` in "
                "`column`; set both or none"
            )
        if nested := [name for name, other in self.others.items() if other.others]:
            raise ValueError(f"others.{nested[0]} has `others` as well; write all of them in episode.others")
        if apart := [name for name, other in self.others.items() if other.workers]:
            raise ValueError(
                f"others.{apart[0]}.workers = {self.others[apart[0]].workers}: the processes of episode.workers run "
                "all episodes; set it there"
            )
        return self

    @property
    def is_single_turn(self) -> bool:
        """Returns whether every sample is one request."""
        return self.name == SINGLE and not self.others


class OwnEpisodeConfig(EpisodeConfig):
    """Settings of an episode that the user wrote."""

    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the class or function."""


class EpisodeKind(ABC):
    """Kind of episode that a name in a recipe selects. A subclass declares the needs of its episodes and makes them."""

    Config: ClassVar[type[EpisodeConfig]] = EpisodeConfig
    brings_reward: ClassVar[bool] = True
    """False if the recipe's `reward` always scores its samples."""
    needs_chat: ClassVar[bool] = False
    """True if it works on messages, so that the tokenizer must have a chat template."""

    def __init__(self, config: EpisodeConfig) -> None:
        self.config = config

    def check(self) -> None:  # noqa: B027 - most have nothing to check
        """Raises UserError for settings that cannot work, if this can be checked before the run starts."""

    def check_policy(self, actions: ActionTokens | None) -> None:  # noqa: B027 - most take any policy
        """Raises UserError for a policy that the episode cannot use. actions: see Session."""

    def notes(self) -> tuple[str, ...]:
        """Returns sentences about the episodes that a run prints once, at its start."""
        return ()

    def tools(self) -> tuple[ToolSpec, ...]:
        """Returns the tools that its prompts list."""
        return ()

    @abstractmethod
    def create(self) -> Episode:
        """Creates the object that runs the episodes of one process."""


class _OwnEpisode(EpisodeKind):
    """Episode that the user wrote: a class with `run`, created with `options`, or an object with `run`."""

    Config = OwnEpisodeConfig
    config: OwnEpisodeConfig

    def check(self) -> None:
        self.create()

    def create(self) -> Episode:
        spec = self.config.name
        found = load_object("episode", spec)
        made = self._make_episode(found) if inspect.isclass(found) or not hasattr(found, "run") else found
        run = getattr(made, "run", None)
        if not inspect.iscoroutinefunction(run):
            what = "no method `run`" if run is None else "a method `run` that is not an `async def`"
            raise UserError(f"episode {spec!r} has {what}: write `async def run(self, prompt, session)`.")
        try:
            inspect.signature(run).bind(None, None)
        except TypeError as error:
            raise UserError(f"episode {spec!r} cannot be run as run(prompt, session): {error}.") from None
        return made  # type: ignore[return-value]  # it has the method

    def _make_episode(self, found: object) -> object:
        if not callable(found):
            raise UserError(f"episode {self.config.name!r} is a {type(found).__name__}, not a class with `run`.")
        try:
            return found(**self.config.options)
        except TypeError as error:
            given = ", ".join(f"{name}={value!r}" for name, value in self.config.options.items())
            raise UserError(f"episode {self.config.name!r} cannot be made with ({given}): {error}.") from error


def episode_names() -> list[str]:
    """Lists the built-in episodes, sorted."""
    return sorted(name for package in _import_packages() for name in class_names(package, EpisodeKind))


def episode_kind(spec: str) -> type[EpisodeKind]:
    """Finds a built-in by name, or the user's `package.module:Name`. Raises UserError if it does not exist."""
    if ":" in spec:
        found = load_object("episode", spec)
        return found if inspect.isclass(found) and issubclass(found, EpisodeKind) else _OwnEpisode
    package = next((each for each in _import_packages() if spec in class_names(each, EpisodeKind)), None)
    if package is None:
        raise unknown_name("episode", spec, episode_names())
    return find_class("episode", package, spec, EpisodeKind)  # type: ignore[type-abstract]


def _import_packages() -> list[ModuleType]:
    return [importlib.import_module(folder) for folder in FOLDERS]


def parse_episode(given: object) -> object:
    """Reads an episode's settings from its name, or from a mapping with `name`. Raises UserError for an unknown one."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        return given
    spec = given.get("name", SINGLE)
    if not isinstance(spec, str):
        raise UserError(f"episode.name = {spec!r}: write a name.")
    return episode_kind(spec).Config.parse(given, where=f"episode {spec}")


EpisodeConfig.model_rebuild()  # `others` contains further EpisodeConfigs, which parse_episode reads


def create_kind(config: EpisodeConfig) -> EpisodeKind:
    """Returns the kind that the settings name, without the choice by rows."""
    return episode_kind(config.name)(config)
