"""interlace: reinforcement-learning post-training where the flow is written once and the way it runs is data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from interlace.core.version import VERSION

if TYPE_CHECKING:
    from interlace.algorithms.base import Advantages, Algorithm
    from interlace.api.background import Server
    from interlace.api.commands import compare, evaluate, lm_eval_model, load_run, plan, profile, serve, simulate
    from interlace.api.run import TrainedRun
    from interlace.api.sweep import sweep
    from interlace.api.train import dry_run, train
    from interlace.core.errors import InterlaceError, UserError
    from interlace.robots.envs.base import Simulator as Env
    from interlace.rollouts.base import Episode, Outcome, Session, Turn
    from interlace.run.callbacks import StepInfo
    from interlace.run.clusters.base import run_flow
    from interlace.run.recipe.config import Recipe
    from interlace.run.recipe.load import load_recipe
    from interlace.runtime.channel import Channel
    from interlace.runtime.worker import Worker, operation

__version__ = VERSION

_PLACES = {
    "interlace.algorithms.base": ("Advantages", "Algorithm"),
    "interlace.api.background": ("Server",),
    "interlace.api.commands": (
        "compare",
        "evaluate",
        "lm_eval_model",
        "load_run",
        "plan",
        "profile",
        "serve",
        "simulate",
    ),
    "interlace.api.run": ("TrainedRun",),
    "interlace.api.sweep": ("sweep",),
    "interlace.api.train": ("dry_run", "train"),
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
    "StepInfo", "TrainedRun", "Turn", "UserError", "Worker", "compare", "dry_run", "evaluate", "lm_eval_model",
    "load_recipe", "load_run", "operation", "plan", "profile", "run_flow", "serve", "simulate", "sweep", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a public name, and torch if it needs that, when it is first used."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), _NAMED_OTHERWISE.get(name, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, for the completion of a notebook."""
    return [*__all__, "__version__"]
