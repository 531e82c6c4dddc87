"""Rollout engines by name, one file each: the values of a recipe's `rollout.engine`.

No module imports torch or its engine's library before it creates an engine.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, builtin_names, concrete_subclass, load_object
from interlace.engines.rollout.config import EngineConfig, KVNeeds

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from interlace.engines.rollout.protocol import RolloutEngine
    from interlace.models.config import ModelConfig
    from interlace.models.loading import LoadedModel
    from interlace.models.size import ModelSize

Feature: TypeAlias = Literal["raw_logprobs", "truncation", "low_temperature", "kv_offload", "kv_use", "invariance"]
"""Abilities that only some engines have. raw_logprobs: the log-probs of the unmodified logits, in addition to the
sampled ones. truncation: log-probs after top_p, top_k and min_p. low_temperature: temperatures above 0 and below
LOW_TEMPERATURE. kv_offload: a KV cache that survives a change of hands. kv_use: a report of the KV cache's use in each
step. invariance: a sample's bits do not depend on its batch."""
LOW_TEMPERATURE = 0.01
"""vLLM samples at this temperature if a request has a lower one above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSite:
    """Place of an engine, and its inputs other than the loaded model."""

    model: "ModelConfig"
    """Settings from which the model was loaded."""
    devices: tuple[str, ...]
    """Names of the devices in torch."""
    seed: int
    """Seed of the sampling noise."""
    num_threads: int
    """Threads of the host for one engine."""
    mesh: "DeviceMesh | None" = None
    """Ranks that form the engine, if it has several."""
    instance: int = 0
    """Index of the engine among the engines of the run."""
    place: str = ""
    """Text that is equal for engines on the same devices of a machine, also in another process of the run."""
    url: str | None = None
    """Address of the server, for one that joined; if None, the index of the engine selects it."""
    logs: Path | None = None
    """Folder for the logs of servers that the engine starts; None for a temporary one."""
    detaches: bool = False
    """True if servers with a lease are no children of this process, because it may end before the run, as on Ray."""
    kv_needs: KVNeeds = KVNeeds()
    """Facts that determine the size of the KV cache, for engines that choose it."""


class EngineKind(ABC):
    """Kind of engine with a name in recipes. A subclass states the requirements of its engines and creates them."""

    Config: ClassVar[type[EngineConfig]] = EngineConfig
    lacks: ClassVar[Mapping[Feature, str]] = {}
    """Abilities that these engines lack, each with the reason."""
    takes_adapters: ClassVar[bool] = False
    """True if these engines add adapters that are sent alone to their base; see TakesAdapters."""
    is_service: ClassVar[bool] = False
    """True if these engines are servers, which may be lost and return."""
    remark: ClassVar[str] = ""
    """Remark that a list of engines adds to the name."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def num_devices(self, pool: str) -> int | None:  # noqa: ARG002 - the result of some engines depends on the pool
        """Returns the devices of a pool (cpu, cuda) that one instance uses; None for as many as it has threads."""
        return 1

    @property
    def draws_known_ids(self) -> bool:
        """Returns True if the engines never draw ids after the tokenizer's last one. The trainer then leaves these out
        too."""
        return False

    @property
    def num_ranks(self) -> int:
        """Returns the number of processes of one instance; all of them are created and called in the same way."""
        return 1

    @property
    def num_addresses(self) -> int | None:
        """Returns the number of running servers that are the engines; None if the placement places the engines."""
        return None

    def absence(self, pool: str) -> str | None:  # noqa: ARG002 - some engines run anywhere
        """Returns the reason why this kind cannot run on a pool's devices (cpu, cuda), with the fix; None if it can."""
        return None

    def kv_bytes_per_token(self, size: "ModelSize") -> int:
        """Returns the bytes that one token of a model takes in the KV cache."""
        return size.kv_bytes_per_token

    def longest_in(self, max_tokens: int) -> int:
        """Returns the length of the longest sequence that fits into a KV cache of `max_tokens` tokens."""
        return max_tokens

    def longest_sequence(self, context: int | None = None) -> int:
        """Returns the length of the longest sequence that these engines generate, in tokens.

        context: length that the model supports; None if it has no limit.
        """
        fitting = self.longest_in(self.config.kv_tokens)
        return min(context or fitting, fitting)

    def check_model(self, model: "PreTrainedModel", pool: str) -> None:  # noqa: B027 - most engines support any model
        """Raises UserError for a model that it cannot serve. Only shapes and types of the model are available."""

    @abstractmethod
    def create(self, loaded: "LoadedModel", site: EngineSite) -> "RolloutEngine":
        """Creates one engine, which takes the model over."""


def engine_names() -> list[str]:
    """Lists the built-in engines, sorted, without importing them."""
    import interlace.engines.rollout.kinds as package

    return builtin_names(package)


def engine_kind(spec: str) -> type[EngineKind]:
    """Finds a built-in engine by name, or a user's `package.module:Class`. Raises UserError if it does not exist."""
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
    """Creates the engine kind of some settings. Raises UserError if the user's class cannot be created."""
    kind = engine_kind(config.engine)
    try:
        return kind(config)
    except TypeError as error:
        what = f"rollout.engine {config.engine!r} is made as {kind.__name__}(config)"
        raise UserError(f"{what}, which fails: {error}.") from error
