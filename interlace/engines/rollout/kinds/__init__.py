"""Rollout engines by name, one file each: what a recipe's `rollout.engine` may be. None imports torch or its library
before it is asked for an engine.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, builtin_names, concrete_subclass, load_object
from interlace.engines.rollout.config import EngineConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from interlace.engines.rollout.protocol import RolloutEngine
    from interlace.models.config import ModelConfig
    from interlace.models.loading import LoadedModel

Feature: TypeAlias = Literal["raw_logprobs", "truncation", "kv_offload", "kv_use", "invariance"]
"""Abilities that only some engines have: the model's own log-probs beside those sampled from; log-probs after top_p,
top_k and min_p; a KV cache that survives a change of hands; the use of the KV cache step by step; a sample's bits
independent of what shares its batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSite:
    """Place of an engine, and its ingredients besides the loaded model."""

    model: "ModelConfig"
    """Settings that the model was loaded from."""
    devices: tuple[str, ...]
    """Names of the devices in torch."""
    seed: int
    """Seed of the sampling noise."""
    num_threads: int
    """Threads of the host for one engine."""
    mesh: "DeviceMesh | None" = None
    """Ranks that make up the engine, where it has several."""
    instance: int = 0
    """Number of the engine among those of the run."""
    url: str | None = None
    """Address of the server, for one that joined; None: the number of the engine chooses it."""
    logs: Path | None = None
    """Folder for the logs of servers that the engine starts; None: a temporary one."""


class EngineKind(ABC):
    """Kind of engine behind an engine's name in a recipe. A subclass says what its engines need and makes them."""

    Config: ClassVar[type[EngineConfig]] = EngineConfig
    lacks: ClassVar[Mapping[Feature, str]] = {}
    """Abilities that these engines lack, each with the reason."""
    takes_adapters: ClassVar[bool] = False
    """Flag: these engines add an adapter that travels alone to their base, as TakesAdapters says."""
    is_service: ClassVar[bool] = False
    """Flag: these engines are servers, which may be lost and return."""
    remark: ClassVar[str] = ""
    """Remark that a list of engines adds to the name."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def num_devices(self, pool: str) -> int | None:  # noqa: ARG002 - some span as many of one pool as they are given
        """Counts the devices of a pool (cpu, cuda) that one instance computes on; None: as many as it has threads."""
        return 1

    @property
    def num_ranks(self) -> int:
        """Returns the processes that one instance is: of several, each is made and called alike."""
        return 1

    @property
    def num_addresses(self) -> int | None:
        """Returns the number of servers that already run and are the engines; None: the placement places engines."""
        return None

    def absence(self, pool: str) -> str | None:  # noqa: ARG002 - some run anywhere
        """Says why this kind does not run on a pool's devices (cpu, cuda), and what to do; None: it runs."""
        return None

    def longest_in(self, max_tokens: int) -> int:
        """Returns the tokens of the longest sequence that a KV cache of `max_tokens` tokens holds."""
        return max_tokens

    def check_model(self, model: "PreTrainedModel", pool: str) -> None:  # noqa: B027 - most take any model
        """Refuses (UserError) a model that it cannot serve; of the model only shapes and types are there."""

    @abstractmethod
    def create(self, loaded: "LoadedModel", site: EngineSite) -> "RolloutEngine":
        """Makes one engine, which takes the model over."""


def engine_names() -> list[str]:
    """Lists the built-in engines, sorted. Imports none of them."""
    import interlace.engines.rollout.kinds as package

    return builtin_names(package)


def engine_kind(spec: str) -> type[EngineKind]:
    """Finds a built-in by name, or a user's `package.module:Class`. Raises UserError where there is none."""
    import interlace.engines.rollout.kinds as package

    if ":" not in spec:
        module = builtin_module("rollout engine", package, spec)
        classes = [value for value in vars(module).values() if inspect.isclass(value)]
        return next(one for one in classes if issubclass(one, EngineKind) and one.__module__ == module.__name__)
    found = load_object("rollout engine", spec)
    return concrete_subclass(f"rollout.engine {spec!r}", found, EngineKind)  # type: ignore[type-abstract]


def parse_engine(given: object, where: str = "rollout") -> object:
    """Reads the settings of the engine that a mapping names under `engine`. Raises UserError for an unknown one.

    where: section of the recipe, for messages.
    """
    if not isinstance(given, Mapping):
        return given
    spec = given.get("engine", EngineConfig.model_fields["engine"].default)
    if not isinstance(spec, str):
        raise UserError(f"{where}.engine = {spec!r}: write a name.")
    return engine_kind(spec).Config.parse(given, where=f"{where}, with engine {spec}")


def create_kind(config: EngineConfig) -> EngineKind:
    """Makes the engine kind of some settings. Raises UserError where the user's own class cannot be made."""
    kind = engine_kind(config.engine)
    try:
        return kind(config)
    except TypeError as error:
        what = f"rollout.engine {config.engine!r} is made as {kind.__name__}(config)"
        raise UserError(f"{what}, which fails: {error}.") from error
