"""Settings of a recipe's `episode`, and the kinds of episode by name. Imports no torch."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, JsonValue, SerializeAsAny, model_validator

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.messages import ToolSpec
from interlace.core.plugins import builtin_module, builtin_names, load_object
from interlace.episodes.base import Episode
from interlace.models.actions import ActionTokens

HIDDEN = ("base", "by_row", "config", "chat_model", "experts", "history", "imagination", "server")
"""Modules of this folder that are no episodes."""
SINGLE = "single_turn"


class EpisodeConfig(Config):
    """Settings that every episode has. Written as the name alone, or `{name: ..., setting: value, ...}`."""

    name: str = SINGLE
    """A built-in, or your own as package.module:Name."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds of an episode's own code and tools after which its sample fails; waiting for turns does not count."""
    max_turns: int = Field(default=64, ge=1)
    """Turns of an episode; asking for one more fails its sample. `tools` ends with its last turn instead."""
    workers: int = Field(default=0, ge=0)
    """Processes that run episodes, many at once in each, so that no code of theirs holds the run up: of this machine,
    on Ray of any node; 0: the controller's. One that dies is started again, and its samples begin again."""
    column: str | None = None
    """Column of the data whose value names one of `others` for its row; a row without a value has this episode."""
    others: "dict[str, Annotated[SerializeAsAny[EpisodeConfig], BeforeValidator(parse_episode)]]" = Field(
        default_factory=dict
    )
    """Further episodes by the value that a row names them by. Their time and turns are limited as written here."""

    @model_validator(mode="after")
    def _others_are_named(self) -> Self:
        if bool(self.others) != (self.column is not None):
            raise ValueError(
                f"column = {self.column!r} and others = {sorted(self.others)}: a row names one of `others` in "
                "`column`; set both or none"
            )
        if nested := [name for name, other in self.others.items() if other.others]:
            raise ValueError(f"others.{nested[0]} has others of its own; write all of them in one place")
        return self

    @property
    def is_single_turn(self) -> bool:
        """Says whether every sample is one request."""
        return self.name == SINGLE and not self.others


class OwnEpisodeConfig(EpisodeConfig):
    """Settings of an episode of your own."""

    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments that its class, or function, is called with."""


class EpisodeKind(ABC):
    """Kind of episode behind a name in a recipe. A subclass says what its episodes need and makes them."""

    Config: ClassVar[type[EpisodeConfig]] = EpisodeConfig
    brings_reward: ClassVar[bool] = True
    """False where the recipe's `reward` always scores what it makes."""
    needs_chat: ClassVar[bool] = False
    """True where it works on messages, so that the tokenizer must have a chat template."""

    def __init__(self, config: EpisodeConfig) -> None:
        self.config = config

    def check(self) -> None:  # noqa: B027 - most have nothing to check
        """Refuses (UserError) what cannot work, as far as it shows before anything starts."""

    def check_policy(self, actions: ActionTokens | None) -> None:  # noqa: B027 - most take any policy
        """Refuses (UserError) a policy that cannot serve. actions: see Session."""

    def notes(self) -> tuple[str, ...]:
        """Returns what a run says of its episodes once, at its start."""
        return ()

    def tools(self) -> tuple[ToolSpec, ...]:
        """Returns the tools that its prompts are written with."""
        return ()

    @abstractmethod
    def create(self) -> Episode:
        """Makes the object that runs the episodes of one process."""


class OwnEpisode(EpisodeKind):
    """Episode of a user's own: a class with `run`, made with `options`, or an object that has `run`."""

    Config = OwnEpisodeConfig
    config: OwnEpisodeConfig

    def check(self) -> None:
        self.create()

    def create(self) -> Episode:
        spec = self.config.name
        found = load_object("episode", spec)
        made = self._made(found) if inspect.isclass(found) or not hasattr(found, "run") else found
        run = getattr(made, "run", None)
        if not inspect.iscoroutinefunction(run):
            what = "no method `run`" if run is None else "a method `run` that is no `async def`"
            raise UserError(f"episode {spec!r} has {what}: write `async def run(self, prompt, session)`.")
        try:
            inspect.signature(run).bind(None, None)
        except TypeError as error:
            raise UserError(f"episode {spec!r} cannot be run as run(prompt, session): {error}.") from None
        return made  # type: ignore[return-value]  # it has the method

    def _made(self, found: object) -> object:
        if not callable(found):
            raise UserError(f"episode {self.config.name!r} is a {type(found).__name__}, not a class with `run`.")
        try:
            return found(**self.config.options)
        except TypeError as error:
            given = ", ".join(f"{name}={value!r}" for name, value in self.config.options.items())
            raise UserError(f"episode {self.config.name!r} cannot be made with ({given}): {error}.") from error


def episode_names() -> list[str]:
    """Lists the built-in episodes, sorted."""
    import interlace.episodes as package

    return builtin_names(package, hidden=HIDDEN)


def episode_kind(spec: str) -> type[EpisodeKind]:
    """Finds a built-in by name, or a user's `package.module:Name`. Raises UserError where there is none."""
    import interlace.episodes as package

    if ":" in spec:
        found = load_object("episode", spec)
        return found if inspect.isclass(found) and issubclass(found, EpisodeKind) else OwnEpisode
    module = builtin_module("episode", package, spec, hidden=HIDDEN)
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    return next(one for one in classes if issubclass(one, EpisodeKind) and one.__module__ == module.__name__)


def parse_episode(given: object) -> object:
    """Reads the settings of the episode that a word, or a mapping under `name`, names. UserError for an unknown one."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        return given
    spec = given.get("name", SINGLE)
    if not isinstance(spec, str):
        raise UserError(f"episode.name = {spec!r}: write a name.")
    return episode_kind(spec).Config.parse(given, where=f"episode {spec}")


EpisodeConfig.model_rebuild()  # it holds more of its kind, which parse_episode reads


def create_kind(config: EpisodeConfig) -> EpisodeKind:
    """Returns the kind of some settings, its choice by rows left out."""
    return episode_kind(config.name)(config)
