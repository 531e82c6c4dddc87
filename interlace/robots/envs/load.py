"""Environments by name, with their settings."""

import importlib
from collections.abc import Mapping
from types import ModuleType

from pydantic import Field

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.host_memory import available_bytes
from interlace.core.plugins import concrete_subclass, find_class, load_object
from interlace.robots.envs.base import EnvSettings, Simulator, TaskSimulator, VectorEnv
from interlace.robots.envs.batch import BatchSettings, BatchSimulator
from interlace.robots.envs.batched_envs import BatchedEnvs
from interlace.robots.envs.stepping import SimulatedEnvs


class EnvConfig(Config):
    """Environments of a run, and the processes that simulate them."""

    family: str
    """Family of this folder (metaworld, gymnasium, maniskill, libero, mjx, mujoco_warp, imagined), or your own:
    package.module:Class."""
    settings: dict[str, object] = Field(default_factory=dict)
    """Settings of the family: `tasks`, `horizon`, `action_repeat` and others, including family-specific ones."""
    num_envs: int = Field(default=8, ge=1)
    """Concurrent environments, over all workers."""
    workers: int = Field(default=1, ge=1)
    """Processes that simulate; per instance, if a schedule places the simulators on devices. Affects only the speed."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of a chunk or a reset, in seconds; exceeding it ends the episode, and the process is replaced."""

    def share(self, instance: int, num_instances: int) -> "EnvConfig":
        """Returns the settings of one of several simulator instances, with its share of the environments.

        Raises UserError if there are fewer environments than instances.
        """
        if self.num_envs < num_instances:
            raise UserError(
                f"episode.env.num_envs={self.num_envs}, but schedule.placement.env makes {num_instances} instances of "
                "the simulators. Give each one environment at least, or place them on fewer devices."
            )
        return self.model_copy(update={"num_envs": (self.num_envs + num_instances - 1 - instance) // num_instances})


def create_envs(family: str, settings: Mapping[str, object], num_envs: int) -> VectorEnv:
    """Creates environments in this process.

    family: a built-in's name, or a user's `package.module:Class`, a Simulator, a BatchSimulator or a VectorEnv. Raises
    UserError for an unknown name or setting, a missing library, or environments that do not fit into memory.
    """
    kind, parsed = find_family(family, settings)
    config = EnvConfig.parse({"family": family, "settings": dict(settings), "num_envs": num_envs})
    _check_memory(config, kind, parsed)
    if issubclass(kind, Simulator):
        return SimulatedEnvs(kind, parsed, num_envs)
    if issubclass(kind, BatchSimulator):
        assert isinstance(parsed, BatchSettings)
        return BatchedEnvs(kind, parsed, num_envs)
    assert issubclass(kind, VectorEnv)
    try:
        return kind(parsed, num_envs)
    except TypeError as error:
        raise UserError(f"environments {family!r} are made as {kind.__name__}(settings, num_envs): {error}.") from error


def find_family(
    family: str, settings: Mapping[str, object]
) -> tuple[type[TaskSimulator] | type[VectorEnv], EnvSettings]:
    """Finds a family's class and reads its settings. Raises UserError."""
    if ":" not in family:
        builtin = find_class("environment", _load_package(), family, TaskSimulator)  # type: ignore[type-abstract]
        return builtin, builtin.Settings.parse(settings, where=f"environment {family}")
    found = load_object("environment", family)
    bases: tuple[type[TaskSimulator] | type[VectorEnv], ...] = (VectorEnv, BatchSimulator)
    base = next((each for each in bases if isinstance(found, type) and issubclass(found, each)), Simulator)
    kind: type[TaskSimulator] | type[VectorEnv] = concrete_subclass(f"environment {family!r}", found, base)
    return kind, kind.Settings.parse(settings, where=f"environment {family}")


def simulators_bytes(config: EnvConfig) -> int:
    """Returns the approximate memory of a configuration's simulators; 0 if their family states none."""
    return _estimate_bytes(config, *find_family(config.family, config.settings))


def check_memory(config: EnvConfig) -> None:
    """Raises UserError if the simulators of all processes do not fit into the free memory."""
    _check_memory(config, *find_family(config.family, config.settings))


def _check_memory(config: EnvConfig, kind: type[TaskSimulator] | type[VectorEnv], settings: EnvSettings) -> None:
    needed, there = _estimate_bytes(config, kind, settings), available_bytes()
    if needed <= there:
        return
    assert issubclass(kind, TaskSimulator)  # others state no memory
    fits = max(1, there // kind.memory_bytes)
    less = f"env.num_envs to {fits} or less"
    if _swaps(kind):
        less = f"env.workers to {max(1, fits // len(settings.tasks))} or less, or give fewer tasks"
    raise UserError(
        f"{config.num_envs} environments of {config.family!r} in {config.workers} processes take about "
        f"{needed >> 20} MiB, and {there >> 20} MiB are free; set {less}"
    )


def _estimate_bytes(config: EnvConfig, kind: type[TaskSimulator] | type[VectorEnv], settings: EnvSettings) -> int:
    if not issubclass(kind, TaskSimulator):
        return 0
    if issubclass(kind, BatchSimulator):  # a batch counts once for each environment
        return len(settings.tasks) * config.num_envs * kind.memory_bytes
    return (len(settings.tasks) * config.workers if _swaps(kind) else config.num_envs) * kind.memory_bytes


def _swaps(kind: type[TaskSimulator]) -> bool:
    return issubclass(kind, Simulator) and kind.swaps


def _load_package() -> ModuleType:
    return importlib.import_module("interlace.robots.envs")
