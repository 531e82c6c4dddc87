"""Settings that the sources of a mixture and the recipe take from each other, in the unparsed settings of a recipe."""

from collections.abc import Mapping, Sequence
from typing import Any

from interlace.core.config import Config
from interlace.run.recipe.algorithm_by_source import OF_STEP


def share_reward(data: Any) -> Any:
    """Takes the first source's reward as the recipe's if the recipe has none and all sources of a mixture have one."""
    parts = _list_parts(data)
    if not parts or data.get("reward") is not None or any(part.get("reward") is None for part in parts):
        return data
    return {**data, "reward": parts[0]["reward"]}


def complete_algorithms(data: Any) -> Any:
    """Adds the recipe's settings to the algorithms of sources: all if `name` is left out, else the ones of OF_STEP.

    If the recipe has no algorithm and all sources name one, the first is the recipe's.
    """
    parts = _list_parts(data)
    if not any(part.get("algorithm") is not None for part in parts):
        return data
    if data.get("algorithm") is None and all("name" in _to_mapping(part.get("algorithm") or {}) for part in parts):
        data = {**data, "algorithm": parts[0]["algorithm"]}
    recipes = _to_mapping(data.get("algorithm") or {})
    of_step = {name: recipes[name] for name in OF_STEP if name in recipes}

    def complete(part: Mapping[str, object]) -> Mapping[str, object]:
        if part.get("algorithm") is None:
            return part
        given = _to_mapping(part["algorithm"])
        return {**part, "algorithm": {**(of_step if "name" in given else recipes), **given}}

    task, completed = data["task"], [complete(part) for part in parts]
    return {**data, "task": {**task, "mixture": completed} if isinstance(task, Mapping) else completed}


def _list_parts(data: Any) -> Sequence[Mapping[str, object]]:
    """Returns the sources of the mixture; none if the settings are no mapping or a source is no mapping."""
    task = data.get("task") if isinstance(data, Mapping) else None
    parts = task.get("mixture") if isinstance(task, Mapping) else task
    found = list(parts) if isinstance(parts, list | tuple) else []
    return found if all(isinstance(part, Mapping) for part in found) else []


def _to_mapping(algorithm: object) -> dict[str, object]:
    """Returns the settings of an algorithm. Raises ValueError for a value of another type."""
    if isinstance(algorithm, Config):
        return algorithm.model_dump(mode="json")
    if isinstance(algorithm, Mapping):
        return dict(algorithm)
    if isinstance(algorithm, str):
        return {"name": algorithm}
    raise ValueError(f"algorithm = {algorithm!r} of a source: write a name, or a mapping with the settings to change")
