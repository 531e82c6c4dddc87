"""Results of reward functions become rewards, and built-in rewards give the right verdicts."""

import json
from collections.abc import Mapping

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.types import JSON, RewardResult
from interlace.rewards.base import Score, ScoreRequest, add_up, evaluate_batch, load_reward, load_rewards
from interlace.rewards.config import RewardConfig
from tests.support.evaluate_reward import evaluate


def score(config: RewardConfig, response: str, answer: str = "", **metadata: JSON) -> RewardResult:
    request = ScoreRequest(prompt="q", response=response, answer=answer, metadata=metadata)
    return evaluate(load_reward(config.name), config, request)


def returning(value: Score) -> RewardResult:
    def function(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> Score:
        return value

    request = ScoreRequest(prompt="P", response="", answer="", metadata={})
    return evaluate(function, RewardConfig(correct=2.0, incorrect=-1.0), request)


def test_a_verdict_becomes_the_configured_reward() -> None:
    assert (returning(True).reward, returning(True).parts) == (2.0, {"accuracy": 1.0})
    assert (returning(False).reward, returning(False).parts) == (-1.0, {"accuracy": 0.0})


@pytest.mark.parametrize(
    "given", [{"correct": 1e39}, {"incorrect": -1e39}, {"shaping": {"overlong_limit": 9, "overlong_penalty": 1e39}}]
)
def test_a_verdict_that_is_infinite_in_float32_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"is infinite in float32"):
        RewardConfig.parse(given)


def test_a_function_that_changes_its_arguments_does_not_change_the_row() -> None:
    """The other samples of the prompt have the same row, and so do later steps."""

    def takes(metadata: dict[str, JSON], messages: list[dict[str, str]], cases: list[int]) -> float:
        messages[0]["content"] = ""
        cases.append(1)
        return float(metadata.pop("level")) + len(cases)  # type: ignore[arg-type]

    row, chat = {"level": 3, "cases": [0]}, ({"role": "user", "content": "q"},)
    request = ScoreRequest(prompt="q", response="", answer="", metadata=row, messages=chat)
    found = [evaluate(takes, RewardConfig(name="package.module:function"), request) for _ in range(2)]
    assert [each.reward for each in found] == [5.0, 5.0], found
    assert row == {"level": 3, "cases": [0]} and chat[0]["content"] == "q"


def test_an_empty_dict_is_no_reward() -> None:
    """A function that forgot its parts gave each sample the reward 0, and the run trained on nothing."""
    failure = returning({}).failure or ""
    assert "reward 'returning.function': the reward function returned {}" in failure


def test_a_verdict_has_no_parts_to_weigh() -> None:
    """Its metric is 1 or 0 whatever it counts as, so a weight of half would not halve the reward."""
    weights = {"shaping": {"weights": {"accuracy": 0.5}}}
    with pytest.raises(UserError, match="correct and incorrect"):
        RewardConfig.parse({"name": "exact", **weights})
    own = RewardConfig.parse({"name": "package.module:function", **weights})
    request = ScoreRequest(prompt="P", response="", answer="", metadata={})
    assert "returned a verdict" in (evaluate(lambda *_: True, own, request).failure or "")
    assert evaluate(lambda *_: {"accuracy": 1.0}, own, request).parts == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"name": "model", "model": "folder"}, "right"),
        ({"name": "package.module:function"}, "mean"),
        ({"name": "package.module:function", "shaping": {"overlong_limit": 8}}, "overlong"),
    ],
)
def test_a_weight_of_a_part_that_never_comes_is_refused(given: dict[str, object], part: str) -> None:
    shaping = {**given.get("shaping", {}), "weights": {part: 2}}  # type: ignore[dict-item]
    with pytest.raises(UserError, match=f"shaping.weights names '{part}'"):
        RewardConfig.parse({**given, "shaping": shaping})
    RewardConfig.parse({"name": "model", "model": "folder", "shaping": {"weights": {"model": 2}}})


def test_a_number_is_the_reward_and_parts_add_up() -> None:
    assert (returning(0.25).reward, returning(0.25).parts) == (0.25, {})
    assert (returning(1).reward, returning(1).parts) == (1.0, {})
    both = returning({"right": 1.0, "brief": -0.25})
    assert (both.reward, both.parts) == (0.75, {"right": 1.0, "brief": -0.25})


@pytest.mark.parametrize("weights", [(1.0, 0.1), (0.7, 0.2, 0.1)])
def test_a_sum_of_rewards_counts_as_right_from_one(weights: tuple[float, ...]) -> None:
    """A verdict counts as 1 there, which would never reach the 5 of a single verdict."""
    parts = [{"name": "exact", "weight": weight, "label": f"part{place}"} for place, weight in enumerate(weights)]
    config = RewardConfig.model_validate(parts)
    right, wrong = (
        add_up([(f"part{n}", weight, value) for n, weight in enumerate(weights)], config) for value in (True, False)
    )
    assert (config.is_right(right), config.is_right(wrong), config.incorrect) == (True, False, 0.0)
    assert RewardConfig.model_validate({"parts": parts, "correct": 2.0}).correct == 2.0


def test_a_verdict_of_numpy_is_one() -> None:
    for verdict in (True, False):
        found, plain = returning(np.bool_(verdict)), returning(verdict)
        assert (found.reward, found.parts) == (plain.reward, plain.parts)


HUGE = 1e308
"""A number to Python; infinite in float32, and so is the sum of two to Python too."""


@pytest.mark.parametrize(
    "value",
    [None, "much", float("nan"), float("inf"), -HUGE, {"right": None}, {"a": HUGE, "b": HUGE}, {"mean": 1.0}],
)
def test_what_is_no_number_fails_the_sample(value: Score) -> None:
    failure = returning(value).failure
    assert failure is not None
    assert "the reward function returned" in failure
    assert "reward 'returning.function'" in failure and failure.endswith("(prompt 'P')"), "its function and prompt"


def test_a_part_is_not_called_as_what_shaping_adds() -> None:
    def own(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> Score:
        return {"task": -1.0, "brief": 2.0}

    request = ScoreRequest(prompt="P", response="", answer="", metadata={})
    alone, beside = RewardConfig(), RewardConfig.parse({"shaping": {"length_weight": 1.0}})
    assert evaluate(own, alone, request).failure is None
    assert "'task'" in str(evaluate(own, beside, request).failure)


def test_only_the_last_tag_counts() -> None:
    config = RewardConfig(name="exact", tag="answer")
    assert score(config, "<answer>3</answer> no: <answer>\n4 </answer>", "4").reward == 5.0
    assert score(config, "<answer>4</answer><answer>3</answer>", "4").reward == -5.0
    thoughts = "<think>I write it in <answer> tags.</think><answer>4</answer>"
    assert score(config, thoughts, "4").reward == 5.0, "the thoughts may name the tag"
    for untagged in ("4", "<answer>4", "4</answer>", ""):
        assert score(config, untagged, "4").parts == {"accuracy": 0.0}
    assert score(RewardConfig(name="exact"), " 4\n", "4").reward == 5.0


def test_characters_are_handed_on_as_a_list() -> None:
    def function(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> bool:
        return bool(json.loads(response) == ["0", "4", '"'])

    config = RewardConfig(tag="answer", answer_format="characters")
    request = ScoreRequest(prompt="", response='<answer>04"</answer>', answer="", metadata={})
    assert evaluate(function, config, request).reward == 5.0


def test_reasoning_gym_wants_full_marks() -> None:
    import reasoning_gym

    for name in ("number_sorting", "chain_sum", "spell_backward", "graph_color"):
        config = RewardConfig(name="reasoning_gym")
        item = reasoning_gym.create_dataset(name, seed=3, size=1)[0]
        answer = item["answer"] or json.dumps(item["metadata"]["possible_answer"])
        assert score(config, answer, item["answer"] or "", **item["metadata"]).reward == 5.0, name
        # chain_sum and spell_backward give part of the marks to an answer that contains the right one.
        assert score(config, f"{answer} or so", item["answer"] or "", **item["metadata"]).reward == -5.0, name


def test_reasoning_gym_scores_its_own_prompts_only() -> None:
    failure = score(RewardConfig(name="reasoning_gym"), "4", "4").failure
    assert failure is not None
    assert "prompts of a reasoning_gym dataset only" in failure


@pytest.mark.parametrize(
    ("response", "answer", "is_right"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", True),
        ("1/2", r"\frac12", True),
        ("x^2+1", "$1+x^2$", True),
        ("The answer is 42.", "42", True),
        ("2x + 1", "2x+1", True),
        ("it is 43", "42", False),
        (r"so it costs \boxed{\$18.90}", r"\$18.90", True),
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", False),
        (r"\boxed{13_9}", "13_8", False),
        (r"\boxed{11_2}", "3", True),
        (r"\boxed{11_{2}}", "4", False),
        (r"\boxed{5.}", "5", True),
        (r"$5.$", "5", True),
        (r"\boxed{1\,000}", "1000", True),
        (r"\boxed{2\,000}", "1000", False),
        (r"\boxed{4}. Wait, no. So it is \boxed{3}.", "3", True),
        (r"\boxed{3} or \boxed{4}", "3", False),
        (r"<think>\boxed{4}?</think> \boxed{3}", "3", True),
        (r"\pm 5", "5", False),
        ("3, 4", "4", False),
        ("3;4", "3", False),
        ("x=2 or x=5", "5", False),
        ("x=2 or x=5", r"\{2,5\}", True),
        ("3, 4", "4, 3", True),
        ("1,234", "1234", True),
        ("x = 1,234", "1234", True),
        ("**3,14**", "3.14", True),
        ("1,000, 2,000", "2000", False),
        ("2 + 5 = 7, 7*2 = 14", "14", True),
        ("x = 7, 7*2 = 14", "14", False),
        ("(3, 4)", "(3, 4)", True),
        ("6 = 5", "5", False),
        ("5 = 5.0", "5", True),
        (r"\boxed{x = 6 = 5}", "5", False),
        (r"\boxed{5 = 5.0}", "5", True),
        ("1/3 = 0.33", "0.33", True),
        (r"\boxed{\frac{200}{3} = 66.67}", "66.67", True),
        (r"\boxed{\frac{200}{3} = 66.5}", "66.5", False),
        (r"50\%", "0.5", True),
        (r"50\%", "50", True),
        ("50", r"50\%", True),
        (r"50\%", "5000", False),
        ("In total, 4", "4", True),
        ("The answer is C", "C", True),
        ("", "42", False),
        ("Of (A) 3 and (B) 4, the answer is (B).", "B", True),
        ("Of (A) 3 and (B) 4, the answer is (B).", "A", False),
        ("Answer: option (B)", "B", True),
        ("The answer is not option (A) but C.", "A", False),
        ("Consider option (B): it fails because x > 3. Therefore (C) is correct.", "B", False),
        ("Option (A) is wrong, option (B) too.", "B", False),
        ("The correct choice is **(D)**, because (A), (B) and (C) fail.", "(D)", True),
        ("The correct choice is **(D)**, because (A), (B) and (C) fail.", "C", False),
    ],
)
def test_math_verify_compares_values_not_spellings(response: str, answer: str, is_right: bool) -> None:
    assert score(RewardConfig(name="math_verify"), response, answer).parts == {"accuracy": float(is_right)}


def test_an_answer_that_is_no_mathematics_fails_the_sample() -> None:
    failure = score(RewardConfig(name="math_verify"), "42", "").failure
    assert failure is not None
    assert "finds no expression in the answer" in failure


def test_unknown_rewards_name_the_known() -> None:
    with pytest.raises(UserError, match=r"Did you mean 'exact'\? Known: exact, math_verify, reasoning_gym\. Your own"):
        load_reward("exct")
    with pytest.raises(UserError, match="has no 'absent'"):
        load_reward("interlace.core.types:absent")
    with pytest.raises(UserError, match="has no 'tme'") as raised:  # what a module imports is not its own
        load_reward("tests.support.reward_functions:tme")
    assert "'time'" not in str(raised.value)
    with pytest.raises(UserError, match="not something that can be called"):
        load_reward("interlace.core.types:JSON")


def test_the_parts_of_one_function_are_added_without_rounding() -> None:
    """A plain sum of these parts is less than 1, so that right answers would count as wrong in an evaluation."""

    def function(response: str) -> dict[str, float]:
        return {"value": 0.7, "form": 0.2, "length": 0.1}

    config = RewardConfig(name="package.module:function", correct=1.0, incorrect=0.0)
    found = evaluate(function, config, ScoreRequest(prompt="q", response="", answer="", metadata={}))
    assert found.reward == 1.0 and config.is_right(found)


def test_the_parts_of_a_sum_include_responses_without_the_tag() -> None:
    """The metric of a part is the mean over the samples that have it."""
    config = RewardConfig.parse({"parts": [{"name": "exact", "label": "right"}], "tag": "answer"})
    requests = [
        ScoreRequest(prompt="q", response=text, answer="4", metadata={}) for text in ("<answer>4</answer>", "4")
    ]
    found = evaluate_batch(load_rewards(config), config, requests)
    assert [(each.reward, each.parts) for each in found] == [(1.0, {"right": 1.0}), (0.0, {"right": 0.0})]
