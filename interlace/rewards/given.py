"""Reward functions that a program gives as objects. Their names here are known in this process only."""

import sys

from interlace.core.callables import PROCESS_NAME, make_process_name
from interlace.core.errors import UserError
from interlace.rewards.config import GIVEN, RewardConfig, reward_names
from interlace.rewards.signature import name_of_function

_given: dict[str, object] = {}


def name_of(function: object) -> str:
    """Returns a function's name in a recipe: package.module:name if it can be imported, else a name of this module."""
    if name := importable_name(function):
        return name
    known = next((known for known, each in _given.items() if each is function), None)
    if known is None:
        known = make_process_name(function, label_of_function(function))
        _given[known] = function
    return f"{GIVEN}{known}"


def importable_name(value: object) -> str | None:
    """Returns package.module:name of a function or class if other processes find it by that; else None.

    They do not find names of the main file, nor of a module that was loaded from a file outside of sys.path.
    """
    name = loaded_name(value)
    return name if name and _is_found_again(name.partition(":")[0]) else None


def loaded_name(value: object) -> str | None:
    """Returns module:name of a function or class if this process finds it by that; else None."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module in (None, "__main__", "builtins") or not name:
        return None
    is_there = getattr(sys.modules.get(str(module)), name, None) is value
    return f"{module}:{name}" if is_there else None


def _is_found_again(name: str) -> bool:
    """Returns whether an import in another process finds the file that a module of this process was loaded from."""
    loaded, parent = getattr(sys.modules.get(name), "__spec__", None), name.rpartition(".")[0]
    if loaded is None or (parent and not _is_found_again(parent)):
        return False
    path = getattr(sys.modules.get(parent), "__path__", None)
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    found = next((spec for find in finders if find and (spec := find(name, path, None))), None)
    return found is not None and found.origin == loaded.origin


def label_of_function(function: object) -> str:
    """Returns the name of the metric of a function that is one of several rewards."""
    return name_of_function(function).rpartition(".")[2].strip("<>")


def is_given(config: RewardConfig) -> bool:
    """Returns whether a reward has a function that only this process knows."""
    return any(name.startswith(GIVEN) for name in reward_names(config))


def __getattr__(name: str) -> object:
    """Finds a function by its name here."""
    if not name.startswith(PROCESS_NAME):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _given:
        raise UserError(
            f"reward {__name__}:{name} was a function of the program that started the run, and is not here. Put it in "
            "a module, and name it as reward=package.module:function."
        )
    return _given[name]
