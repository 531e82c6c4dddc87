"""The section `reward` made from a program's function, object or list of rewards."""

import inspect
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypeGuard

from pydantic import ValidationError

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.rewards.base import load_rewards
from interlace.rewards.config import SUM, RewardConfig
from interlace.rewards.given import label_of_function, name_of
from interlace.rewards.signature import RewardCall
from interlace.run.recipe.config import SHORT


def reward_section(reward: object) -> object:
    """Returns the section `reward`. The verdict of a function counts as 1 or 0. Raises UserError."""
    if isinstance(reward, list | tuple):
        return {"name": SUM, "parts": _list_parts(reward)}
    if isinstance(reward, Config):
        return reward.model_dump(mode="json")
    if isinstance(reward, str):
        return reward
    if isinstance(reward, Mapping):
        if isinstance(parts := reward.get("parts"), list | tuple) and parts:
            return {"name": SUM, **reward, "parts": _list_parts(parts)}
        name = reward.get("name", "exact")
        return (
            dict(reward)
            if isinstance(name, str) or "parts" in reward
            else {**_describe_function(name), **reward, "name": name_of(name)}
        )
    return _describe_function(reward)


def load_calls(reward: object) -> Sequence[RewardCall]:
    """Returns the calls of a reward section; none for an invalid section, which the recipe's check rejects."""
    try:
        config = RewardConfig.model_validate(SHORT["reward"](reward) if isinstance(reward, str) else reward)
    except ValidationError:
        return ()
    return load_rewards(config).calls if config.model is None else ()


def _describe_function(function: object) -> dict[str, Any]:
    if not (callable(function) or hasattr(function, "score")):
        raise UserError(
            f"reward is of type {type(function).__name__}: give a function, an object with `score`, the name of "
            "a built-in, a list of these, or the section `reward`."
        )
    if all(hasattr(function, name) for name in ("forward", "state_dict")) and not inspect.isclass(function):
        raise UserError(
            f"reward is a {type(function).__name__}, a module of torch, and its call names no arguments: give a "
            "function that calls it. A sequence classifier is saved to a folder with its tokenizer and given as "
            'reward={"name": "model", "model": FOLDER}.'
        )
    return {"correct": 1.0, "incorrect": 0.0, "name": name_of(function)}


def _list_parts(rewards: Sequence[object]) -> list[dict[str, object]]:
    """Returns the parts of a reward given as a list: names, functions, mappings of a part, and pairs with a weight."""
    found: list[dict[str, object]] = []
    labels: set[str] = set()
    if not rewards:
        raise UserError(
            "reward is an empty list: give functions or names, each alone or with a weight, such as "
            "[correct, (brief, 0.1)]."
        )
    for each in rewards:
        reward, weight = each if _has_weight(each) else (each, 1.0)
        if isinstance(reward, list | tuple):
            raise UserError(
                f"a part of reward is {reward!r:.80}: a part is a function, a name or a mapping, alone or in a pair "
                "with its weight, such as (brief, 0.1)."
            )
        given = reward.model_dump(mode="json", exclude_unset=True) if isinstance(reward, Config) else reward
        if reward is not each and isinstance(given, Mapping) and "weight" in given:
            raise UserError(
                f"a part of reward has two weights, {given['weight']!r} in its mapping and {weight!r} beside it: give "
                "one of them"
            )
        part = {"weight": weight, **(given if isinstance(given, Mapping) else {"name": given})}
        if (function := part.get("name")) is not None and not isinstance(function, str):
            label = label_of_function(function)
            label = label if label not in labels else f"{label}_{len(found) + 1}"
            labels.add(label)
            part = {"label": label, **part, "name": _describe_function(function)["name"]}
        found.append(part)
    return found


def _has_weight(part: object) -> TypeGuard[tuple[object, object]]:
    """Returns whether a part of a reward is a pair of a reward and its weight."""
    if isinstance(part, list):  # as JSON and YAML write a pair
        return len(part) == 2 and isinstance(part[1], Real)
    return isinstance(part, tuple) and len(part) == 2
