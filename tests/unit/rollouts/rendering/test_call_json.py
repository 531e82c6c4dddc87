"""The JSON of a call has values that every client and tokenizer accepts."""

import pytest

from interlace.rollouts.rendering.parsers.base import json_call, read_argument


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_told_to_the_model(number: str) -> None:
    """Python reads it, and an answer with it was no JSON for clients in other languages."""
    call = json_call(f'{{"name": "f", "arguments": {{"x": {number}}}}}')
    assert call.error == f"The call is not valid JSON: {number} is not a finite number."
    assert read_argument(number, {"type": "number"}, {}) == number


def test_half_of_a_character_is_replaced() -> None:
    """No tokenizer accepts it, so that the next turn failed."""
    call = json_call(r'{"name": "f", "arguments": {"\ud83d": ["\ud83d\ude42 \udc00", 1.5]}}')
    assert call.arguments == {"\ufffd": ["🙂 \ufffd", 1.5]}


def test_arguments_as_text_that_is_no_json_are_told_to_the_model() -> None:
    """The tool was called without arguments."""
    assert json_call('{"name": "f", "arguments": "Paris"}').error == "The arguments of the call are not a JSON object."
    assert json_call('{"name": "f", "arguments": ""}').arguments == {}
