"""A reward function is called with the arguments that it names, in any order, and never by position."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from interlace.core.errors import UserError
from interlace.rewards.base import WRONG_TYPE, LoadedReward, evaluate_batch
from interlace.rewards.config import RewardConfig, RewardPart
from interlace.rewards.signature import ScoreRequest, check_row, reward_call
from tests.support.evaluate_reward import evaluate

CHAT = ({"role": "user", "content": "P"},)


def request(**changed: Any) -> ScoreRequest:
    given = {"prompt": "P", "response": "R", "answer": "A", "metadata": {"level": 3}, "source": "rows"}
    return ScoreRequest(**{**given, "messages": CHAT, "completion_ids": (1, 2), **changed})


def values(function: object, *requests: ScoreRequest) -> list[Any]:
    return asyncio.run(reward_call(function).scores(requests or (request(),)))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    return data_source, solution_str, ground_truth, dict(extra_info)


class Judge:
    def __call__(self, answer: str, response: str) -> Any:
        return answer + response


class Scorer:
    def score(self, response: str) -> Any:
        return response + "!"


async def awaited(response: str, *, level: int, absent: str = "default") -> Any:
    return response, level, absent


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda response, prompt, metadata, answer: (response, prompt, answer), ("R", "P", "A")),
        (lambda answer: answer, "A"),
        (lambda response, /, answer: response + answer, "RA"),
        (lambda level, completion: (level, completion), (3, "R")),
        (lambda completion_ids, messages: (completion_ids, messages[0]["content"]), ([1, 2], "P")),
        (
            lambda prompt, **rest: sorted(rest),
            ["answer", "completion_ids", "level", "messages", "metadata", "response"],
        ),
        (compute_score, ("rows", "R", "A", {"level": 3})),
        (functools.partial(lambda answer, response: answer + response, answer="fixed"), "fixedR"),
        (Judge(), "AR"),
        (Judge, "AR"),
        (Scorer(), "R!"),
        (Scorer().score, "R!"),
        (awaited, ("R", 3, "default")),
        (lambda: 1, 1),
    ],
)
def test_arguments_are_passed_by_name(function: object, expected: object) -> None:
    assert values(function) == [expected]


def test_an_object_that_inherits_an_async_call_is_awaited() -> None:
    class AsyncJudge:
        async def __call__(self, response: str) -> float:
            return float(len(response))

    class InheritingJudge(AsyncJudge):
        pass

    assert reward_call(InheritingJudge()).is_async and values(InheritingJudge()) == [1.0]


def test_a_function_of_a_batch_gets_lists_of_all_samples() -> None:
    def trl(prompts: list[str], completions: list[str], level: list[int], **columns: list[object]) -> list[Any]:
        assert columns["answer"] == ["A", "B"] and columns["completion_ids"] == [[1, 2], [1, 2]]
        return list(zip(prompts, completions, level, strict=True))

    both = request(), request(prompt="Q", response="S", answer="B", metadata={"level": 4})
    assert values(trl, *both) == [("P", "R", 3), ("Q", "S", 4)]


def test_a_row_of_a_batch_keeps_a_column_that_another_row_lacks() -> None:
    calls: list[list[str]] = []

    def tolerance_of(completions: list[str], tolerance: list[float] | None = None) -> list[float]:
        calls.append(completions)
        return tolerance or [0.0] * len(completions)

    rows = [{"tolerance": 0.1}, {"unnamed": 1}, {"tolerance": 0.2}]
    requests = [request(response=str(place), metadata=row) for place, row in enumerate(rows)]
    assert values(tolerance_of, *requests) == [0.1, 0.0, 0.2]
    assert calls == [["0", "2"], ["1"]]


def test_a_chat_reaches_a_function_of_a_batch_as_trl_writes_it() -> None:
    chat = request(metadata={"messages": CHAT}, is_chat=True)
    [(prompt, completion)] = values(lambda prompts, completions: [*zip(prompts, completions, strict=True)], chat)
    assert prompt == list(CHAT) and completion == [{"role": "assistant", "content": "R"}]


def test_a_batch_that_raises_fails_only_the_sample_that_it_cannot_score() -> None:
    def function(completions: list[str]) -> list[float]:
        return [1 / (text != "bad") for text in completions]

    found = values(function, request(response="a"), request(response="bad"), request(response="c"))
    assert found[0] == found[2] == 1.0 and isinstance(found[1], ZeroDivisionError)


@pytest.mark.parametrize(
    "function", [lambda completions: 1.0, lambda completions: [1.0, 2.0], lambda completions: b"1"]
)
def test_a_batch_needs_one_number_for_each_response(function: Callable[..., object]) -> None:
    failure = evaluate(function, RewardConfig(), request()).failure or ""
    assert failure.startswith(WRONG_TYPE) and "the reward function returned" in failure


def declared_text(response: str) -> str:
    return "1.0"


def of_a_trainer(prompts: list[str], completions: list[str], trainer_state: object) -> list[float]:
    return [1.0]


class Needy:
    def __init__(self, model: str) -> None:
        self.model = model

    def __call__(self, response: str) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (Scorer.score, r"reward 'Scorer.score' is a method of the class Scorer, .* Scorer\(...\)\.score"),
        (of_a_trainer, "reward 'of_a_trainer' has the argument 'trainer_state', which only TRL's trainer passes"),
        (lambda response, completions: 1.0, "names 'response', which is one response's"),
        (declared_text, "reward 'declared_text' is declared to return str: a reward is a number"),
        (Needy, "reward 'Needy' is a class, and an object of it needs model"),
        (3, "not something that can be called"),
    ],
)
def test_a_signature_that_no_row_satisfies_is_refused(function: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        reward_call(function)


def test_a_class_of_which_no_object_can_be_made_is_refused_with_the_reason() -> None:
    class Judge:
        def __init__(self) -> None:
            raise FileNotFoundError("no file judge.json")

        def score(self, response: str) -> bool:
            return bool(response)

    with pytest.raises(UserError, match=r"'.*Judge' is a class, .* FileNotFoundError\('no file judge\.json'\)"):
        reward_call(Judge)


def test_a_row_without_the_column_is_refused_with_the_columns_that_it_has() -> None:
    call = reward_call(compute_score)
    check_row(call, request(), "data[3]")
    lacking = request(answer="", metadata={"reward_model": {"ground_truth": "4"}})
    with pytest.raises(
        UserError, match=r"data\[3\] has no 'answer', or an empty one, which reward 'compute_score' names"
    ) as caught:
        check_row(call, lacking, "data[3]")
    assert "Set task.columns.answer=reward_model.ground_truth." in str(caught.value) and "prompt, reward_model" in str(
        caught.value
    )
    with pytest.raises(UserError, match=r"has no 'levl'.*Did you mean 'level'"):
        check_row(reward_call(lambda response, levl: 1.0), request(), "data[0]")


@pytest.mark.parametrize("value", ["1.0", None, [1.0], {"a": {"b": 1.0}}, {"a": "3"}])
def test_a_value_of_another_type_is_no_reward(value: object) -> None:
    failure = evaluate(lambda: value, RewardConfig(), request()).failure or ""
    assert failure.startswith(WRONG_TYPE)


def test_the_score_of_verls_form_is_the_reward_and_the_rest_are_notes() -> None:
    def scored(solution_str: str, ground_truth: str) -> dict[str, object]:
        return {"score": 0.5, "acc": True, "pred": "3"}

    result = evaluate(scored, RewardConfig(), request())
    assert (result.reward, result.parts) == (0.5, {"score": 0.5, "acc": 1.0})
    weighing = RewardConfig.parse({"name": "m:scored", "shaping": {"weights": {"acc": 0.5}}})
    assert "remove the weight" in (evaluate(scored, weighing, request()).failure or "")


def test_the_score_of_verls_form_is_the_reward_also_among_several() -> None:
    def scored(solution_str: str | None = None) -> dict[str, object]:
        return {"score": 0.25, "acc": True, "pred": "2"}

    def brief(response: str) -> float:
        return 1.0

    parts = (RewardPart(name="m:scored", weight=2.0), RewardPart(name="m:brief"))
    reward = LoadedReward(calls=(reward_call(scored), reward_call(brief)), parts=parts)
    config = RewardConfig.parse({"parts": parts})
    [result] = evaluate_batch(reward, config, [request()])
    assert (result.reward, result.parts) == (1.5, {"scored": 0.5, "brief": 1.0})
