"""Check of the name of a metric before a run that shall compare its values."""

import difflib
import re
from functools import cache
from pathlib import Path

from interlace.core.errors import UserError, nearest
from interlace.core.yaml_text import parse_yaml
from interlace.observe.best import EVALUATION
from interlace.run.recipe.config import Recipe, list_rewards

METRICS = Path(__file__).parents[2] / "observe" / "metrics.yaml"
"""Meanings of the metrics, in families."""
TYPO = 0.9
"""Similarity of two names from which one counts as a misspelling of the other."""


def check_best(recipe: Recipe, *, has_callbacks: bool = False) -> None:
    """Raises UserError if no part of the run can measure the metric of `best`. has_callbacks: see check_metric()."""
    if recipe.best:
        check_metric(recipe.best.metric, recipe, key="best.metric", has_callbacks=has_callbacks)


def check_metric(name: str, recipe: Recipe, *, key: str, has_callbacks: bool = False) -> None:
    """Raises UserError for a metric that no part of the run can measure. key: setting or option with the name.

    has_callbacks: functions of a program may log any name for a step. Own rewards, episodes and algorithms may log
    names that are not known before a run, so that for them only a name without a family is refused.
    """
    known, patterns = _read_names()
    is_evaluated = name.startswith(EVALUATION)
    if name in known or (has_callbacks and not is_evaluated) or any(re.fullmatch(each, name) for each in patterns):
        return
    family = name.partition("/")[0]
    is_family = any(each.startswith(f"{family}/") for each in known)
    is_free = ":" in recipe.algorithm.name if is_evaluated else _has_own_code(recipe)
    may_exist = is_free or (is_family and not difflib.get_close_matches(name, known, 1, TYPO))
    if family == name or not may_exist:
        raise UserError(
            f"{key} = {name!r}: no part of this run measures it.{_suggest(name, sorted(known))} The page "
            "docs/reference/metrics.md lists the metrics."
        )


@cache
def _read_names() -> tuple[frozenset[str], tuple[str, ...]]:
    """Returns the names of metrics, and patterns of the names with a computed part.

    There is no pattern of the parts of a reward: it would match each misspelled metric of the reward.
    """
    names = [name for family in parse_yaml(METRICS.read_text(encoding="utf-8")) for name in family["metrics"]]
    computed = [name for name in names if re.search("NAME|PHASE", name)]
    patterns = [re.sub("NAME|PHASE", r"[^\\s]+", re.escape(name)) for name in computed if name != "reward/NAME"]
    return frozenset(names) - {*computed}, tuple(patterns)


def _suggest(name: str, known: list[str]) -> str:
    same = [each for each in known if name in each.split("/")]
    return f" Did you mean {' or '.join(map(repr, same[:3]))}?" if same else nearest(name, known)


def _has_own_code(recipe: Recipe) -> bool:
    """Returns whether a part that may log metrics is a class or function that is not of this package."""
    rewards = list_rewards(recipe)
    episodes = [recipe.episode, *recipe.episode.others.values()]
    algorithms = [recipe.algorithm, *(each.algorithm for each in recipe.task.mixture if each.algorithm)]
    names = [*(each.name for each in algorithms), recipe.rollout.engine, *(each.name for each in episodes)]
    names += [name for each in rewards for name in (each.name, *(part.name for part in each.parts))]
    return any(":" in name for name in names)
