"""The name of a metric is checked before a run, as far as names are known then."""

import pytest

from interlace.core.errors import UserError
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.metric_names import check_metric


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eval/acuracy_greedy", "Did you mean 'eval/accuracy_greedy'"),
        ("reward/maen", "Did you mean 'reward/mean'"),
        ("rewards/mean", "Did you mean 'reward/mean'"),
        ("entropy", "Did you mean 'actor/entropy'"),
        ("quality", "no part of this run measures it"),
    ],
)
def test_a_name_without_a_source_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_metric(name, load_recipe("quickstart"), key="best.metric")


@pytest.mark.parametrize(
    ("name", "overrides", "has_callbacks"),
    [
        ("reward/mean", [], False),
        ("reward/accuracy", [], False),
        ("eval/sums/accuracy_greedy", [], False),
        ("eval/pass@8", [], False),
        ("reward/maen", ["reward=mine:score"], False),
        ("length/words", ["reward=[exact, mine:score]"], False),
        ("actor/spread", ["algorithm=interlace.algorithms.grpo:GRPO"], False),
        ("quality", [], True),
    ],
)
def test_a_name_with_a_possible_source_is_taken(name: str, overrides: list[str], has_callbacks: bool) -> None:
    recipe = load_recipe("quickstart", overrides)
    check_metric(name, recipe, key="best.metric", has_callbacks=has_callbacks)
