"""interlace: reinforcement-learning post-training where the flow is written once and the way it runs is data."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.algorithms.base import Advantages, Algorithm
    from interlace.api.background import Server
    from interlace.api.commands import compare, evaluate, load_run, plan, profile, serve
    from interlace.api.run import TrainedRun
    from interlace.api.train import train
    from interlace.core.errors import InterlaceError, UserError
    from interlace.robots.envs.base import Simulator as Env
    from interlace.rollouts.base import Episode, Outcome, Session, Turn
    from interlace.run.callbacks import StepInfo
    from interlace.run.clusters.base import run_flow
    from interlace.run.recipe.config import Recipe
    from interlace.run.recipe.load import load_recipe
    from interlace.runtime.channel import Channel
    from interlace.runtime.worker import Worker, operation

__version__ = "0.1.0"

_PLACES = {
    "interlace.algorithms.base": ("Advantages", "Algorithm"),
    "interlace.api.background": ("Server",),
    "interlace.api.commands": ("compare", "evaluate", "load_run", "plan", "profile", "serve"),
    "interlace.api.run": ("TrainedRun",),
    "interlace.api.train": ("train",),
    "interlace.core.errors": ("InterlaceError", "UserError"),
    "interlace.robots.envs.base": ("Env",),
    "interlace.rollouts.base": ("Episode", "Outcome", "Session", "Turn"),
    "interlace.run.callbacks": ("StepInfo",),
    "interlace.run.clusters.base": ("run_flow",),
    "interlace.run.recipe.config": ("Recipe",),
    "interlace.run.recipe.load": ("load_recipe",),
    "interlace.runtime.channel": ("Channel",),
    "interlace.runtime.worker": ("Worker", "operation"),
}
"""Modules and their names that are public here; each is imported when one of its names is first used."""
_NAMED_OTHERWISE = {"Env": "Simulator"}
"""Public names that differ from the name in the module."""
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "Advantages", "Algorithm", "Channel", "Env", "Episode", "InterlaceError", "Outcome", "Recipe", "Server", "Session",
    "StepInfo", "TrainedRun", "Turn", "UserError", "Worker", "compare", "evaluate", "load_recipe", "load_run",
    "operation", "plan", "profile", "run_flow", "serve", "simulate", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a public name, and torch if it needs that, when it is first used."""
    if name == "simulate":
        return import_module("interlace.forecast.costs")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), _NAMED_OTHERWISE.get(name, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, for the completion of a notebook."""
    return [*__all__, "__version__"]


class _SimulateFolder(ModuleType):
    """The folder `interlace.forecast.costs`, which is called as the function of that name."""

    def __call__(
        self,
        recipe: str,
        overrides: Sequence[str] = (),
        *,
        schedule: str | None = None,
        devices: str | int = 8,
        profile: str | None = None,
        prompts: int = 8192,
        timeline: str | Path | None = None,
    ) -> object:
        """Runs a recipe on a virtual clock: see interlace.api.commands.simulate."""
        simulate = import_module("interlace.api.commands").simulate
        return simulate(
            recipe, overrides, schedule=schedule, devices=devices, profile=profile, prompts=prompts, timeline=timeline
        )


class _Package(ModuleType):
    """This package: a folder of it that is imported becomes its attribute, and `simulate` is a function as well."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "simulate" and isinstance(value, ModuleType):
            value.__class__ = _SimulateFolder
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
