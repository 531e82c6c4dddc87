"""The reward of reasoning-gym runs no code of a response, and accepts no answer that only deceives a scorer."""

import inspect
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from interlace.core.types import JSON
from interlace.rewards.reasoning_gym import score


def make_item(dataset: str, **parameters: object) -> dict[str, JSON]:
    import reasoning_gym

    item: dict[str, JSON] = reasoning_gym.create_dataset(dataset, seed=3, size=1, **parameters)[0]
    return item


def is_right(item: Mapping[str, JSON], response: str) -> bool:
    metadata = item["metadata"]
    assert isinstance(metadata, dict)
    return score(str(item["question"]), response, metadata, str(item["answer"]))


def list_evaluating_datasets() -> list[str]:
    """Datasets whose module contains a call that evaluates text."""
    import reasoning_gym  # noqa: F401 - registers the datasets
    from reasoning_gym.factory import DATASETS

    def evaluates(dataset: str) -> bool:
        source = inspect.getsource(sys.modules[DATASETS[dataset][0].__module__])
        return any(call in source for call in ("eval(", "parse_expr(", "exec(", "sympify("))

    # codeio runs the code of its own rows, when they are made.
    return sorted(name for name in DATASETS if name != "codeio" and evaluates(name))


def test_no_response_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    quoted = f"__import__('os').mkdir({str(mark)!r})"
    spelled = "exec(" + "+".join(f"chr({ord(letter)})" for letter in quoted) + ")"
    datasets = list_evaluating_datasets()
    assert {"n_queens", "countdown", "simple_integration"} <= set(datasets)
    for dataset in datasets:
        item = make_item(dataset)
        for code in (quoted, spelled, f"[{quoted}]", f"x*{spelled}"):
            assert not is_right(item, code), (dataset, code)
            assert not mark.exists(), f"the scorer of {dataset} executed {code[:40]}"


def test_the_answers_of_rows_are_right() -> None:
    for dataset in {*list_evaluating_datasets(), "complex_arithmetic", "game_of_life_halting", "countdown"}:
        item = make_item(dataset)
        # Rows of propositional_logic have no answer, and some integrals are not solved.
        if item["answer"] is not None and "Integral" not in str(item["answer"]):
            assert is_right(item, str(item["answer"])), dataset


@pytest.mark.parametrize("dataset", ["simple_integration", "intermediate_integration", "polynomial_multiplication"])
@pytest.mark.parametrize(
    "power",
    ["9**9**9", "((9**999)**999)**999", "x**(9**9**9)", "2**(x - x + 10**9)", "2**((x-x+9)*9999999)",
     f"2**{'9' * 400}", f"{'(' * 40}x{'**2)' * 40}", f"{'x + ' * 3000}9**9**9"],
)  # fmt: skip
def test_no_response_computes_a_huge_number(dataset: str, power: str) -> None:
    """It would hold the interpreter, and with it the run, if the reward is computed in the run's process."""
    item = make_item(dataset)
    began_s = time.monotonic()
    assert not is_right(item, f"{item['answer']} + 0*({power})".replace("x", variable_of(item)))
    assert time.monotonic() - began_s < 10
    assert is_right(item, f"({item['answer']})**1") and is_right(
        item, f"{item['answer']} + 0*{variable_of(item)}**(7/2)"
    )


def variable_of(item: Mapping[str, JSON]) -> str:
    """Returns a name of the answer."""
    return re.findall(r"\b[a-zA-Z]\b", str(item["answer"]).replace("C", ""))[0]


@pytest.mark.parametrize("trick", ["[NaN, NaN, NaN]", '["nan", "nan", "nan"]', "[2, 4, 9]", "[1, 3, 8]", "[3, 3, 8]"])
def test_sorted_numbers_must_be_those_of_the_task(trick: str) -> None:
    metadata: dict[str, JSON] = {"source_dataset": "number_sorting", "direction": "ascending"}
    assert score("", "[2.0, 3, 8]", metadata, '["2", "3", "8"]')
    assert not score("", trick, metadata, '["2", "3", "8"]')


@pytest.mark.parametrize(
    "trick",
    ["1e2 + 0*(3 + 5 + 7)", "1_0_0+0*(3+5+7)", "0x64+0*(3+5+7)", "100", "3+5*7", "(3+5+7)**0*100", "(3,5,7)", "3 5 7",
     "-" * 50_000 + "(3+5+7)", "(" * 50_000, "floor(E)*50+0*(3+5+7)"],
)  # fmt: skip
def test_a_countdown_uses_its_numbers_alone(trick: str) -> None:
    metadata: dict[str, JSON] = {"source_dataset": "countdown", "numbers": [3, 5, 7], "target": 100}
    assert not score("", trick, metadata, "?")
    assert score("", " (7+3) * 5 ", {**metadata, "target": 50}, "?")
    assert score("", "7/3*5-5", {**metadata, "numbers": [5, 7, 3, 5], "target": 20 / 3}, "?") is False


def test_a_puzzle_of_24_needs_its_numbers_and_its_value() -> None:
    metadata: dict[str, JSON] = {"source_dataset": "puzzle24", "numbers": [8, 5, 1, 2]}
    assert score("", "8*(5*1 - 2)", metadata, "")
    assert not score("", "6*4+1-1", metadata, ""), "other numbers"
    assert not score("", "49/2+1-1", {**metadata, "numbers": [49, 2, 1, 1]}, ""), "24.5"


@pytest.mark.parametrize("trick", ["Integral(2*x, x)", "integrate(2*x, x)", "x**2 if 1 else 0", "x.__class__", "x**3"])
def test_an_integral_is_not_solved_by_sympy(trick: str) -> None:
    metadata: dict[str, JSON] = {"source_dataset": "simple_integration", "integrand": "2*x", "variable": "x"}
    assert score("", "x**2 + C", metadata, "x**2 + C")
    assert score("", "x*x + k", metadata, "x**2 + C"), "any constant"
    assert not score("", trick, metadata, "x**2 + C")


def test_a_product_is_not_expanded_by_sympy() -> None:
    metadata: dict[str, JSON] = {"source_dataset": "polynomial_multiplication"}
    assert score("", "x**2 + 3*x + 2", metadata, "x**2 + 3*x + 2")
    assert not score("", "expand((x+1)*(x+2))", metadata, "x**2 + 3*x + 2")


@pytest.mark.parametrize(("dataset", "trick"), [("complex_arithmetic", "nan"), ("game_of_life_halting", "x")])
def test_a_scorer_is_not_deceived(dataset: str, trick: str) -> None:
    assert not is_right(make_item(dataset), trick)


def test_a_halting_answer_is_compared_as_a_word() -> None:
    metadata: dict[str, JSON] = {"source_dataset": "game_of_life_halting"}
    assert score("", "False", metadata, "False") and not score("", "True", metadata, "False")
    assert score("", "true.", metadata, "True") and not score("", "false", metadata, "True")


def test_an_answer_may_be_empty() -> None:
    assert score("", "", {"source_dataset": "ab"}, ""), "all tokens of the row cancel"
    assert not score("", "A#", {"source_dataset": "ab"}, "")


def test_an_answer_may_contain_the_name_nan() -> None:
    assert score("", "Nan is here", {"source_dataset": "spell_backward"}, "Nan is here")
