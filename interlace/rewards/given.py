"""Reward functions that a program hands over as objects: found by the name that they get here, in this process only."""

import sys

from interlace.core.errors import UserError
from interlace.rewards.base import RewardFn, is_async

_PREFIX = "function_"
_given: list[RewardFn] = []


def name_of(function: RewardFn) -> str:
    """Returns what a recipe calls a function: package.module:name where it can be imported, else a name given here.

    Raises UserError for an `async def` that cannot be imported: it would be awaited in a process of its own.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is function:
        return f"{module}:{name}"
    if is_async(function):
        raise UserError(
            f"reward {name or function!r} is an `async def` of this program alone, and it is awaited in a process of "
            "its own, which cannot find it: put it in a module and import it from there."
        )
    if function not in _given:
        _given.append(function)
    return f"{__name__}:{_PREFIX}{_given.index(function)}"


def is_given(name: str) -> bool:
    """Says whether a reward's name is one that only this process knows."""
    return name.startswith(f"{__name__}:")


def __getattr__(name: str) -> RewardFn:
    """Finds a function by the name it got here."""
    number = name.removeprefix(_PREFIX)
    if name == number or not number.isdigit():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if int(number) >= len(_given):
        raise UserError(
            f"reward {__name__}:{name} was a function of the program that started the run, and is not here. Put it in "
            "a module, and name it as reward=package.module:function."
        )
    return _given[int(number)]
