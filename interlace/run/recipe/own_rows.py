"""Own rows in a recipe that trains on given rows: settings that belong to the recipe's rows leave with them."""

from collections.abc import Collection, Mapping, MutableMapping

from interlace.algorithms.load import objective_names
from interlace.core.types import JSON
from interlace.data.config import expand_source


def adapt_to_rows(data: MutableMapping[str, JSON], changed: Collection[str]) -> None:
    """Adapts the settings of a recipe, in place, if its `task` is replaced and its algorithm trains on given rows.

    The warm-up leaves, because its examples answer the prompts of the recipe's task and the rows themselves teach, and
    so does the periodic evaluation if no row is held out. changed: dotted keys that the user set; a setting among them
    stays.
    """
    algorithm = data.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    if "task" not in changed or name not in objective_names():
        return
    sections = {key.partition(".")[0] for key in changed}
    if "warmup" not in sections:
        data["warmup"] = None
    if "eval_every" not in sections and not _holds_out_rows(data.get("task")):
        data["eval_every"] = 0


def _holds_out_rows(section: object) -> bool:
    """Returns whether a part of the section holds out rows: by their names or number, or as its source does itself."""
    if isinstance(section, str):
        section = expand_source(section)
    if isinstance(section, list):
        return any(map(_holds_out_rows, section))
    if not isinstance(section, Mapping):
        return False
    if any(_holds_out_by_default(section.get(source)) for source in ("reasoning_gym", "starts")):
        return True
    return any(
        (str(key).startswith("heldout") and bool(value))
        or (isinstance(value, Mapping | list) and _holds_out_rows(value))
        for key, value in section.items()
    )


def _holds_out_by_default(source: object) -> bool:
    """Returns whether a source of procedural rows is given that keeps its default number of held-out rows."""
    return source is not None and not (isinstance(source, Mapping) and "heldout_size" in source)
