"""An explicit map converts table columns to a row; an unusable column is reported with the existing ones."""

import json
from collections.abc import Mapping
from datetime import date

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.data.columns import to_row
from interlace.data.formatting import Row

VERL = {
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"level": 3, "tags": ["a", None]},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "day": None}},
    },
}


def row(
    values: Mapping[str, object], columns: Mapping[str, str | None] | None = None, omit: tuple[str, ...] = ()
) -> Row:
    return to_row(values, columns or {}, omit, uid="u", origin="set:1")


def refusal(values: Mapping[str, object], columns: Mapping[str, str | None] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        row(values, columns)
    return str(caught.value)


def test_a_nested_column_is_named_by_its_path() -> None:
    found = row(VERL, {"answer": "reward_model.ground_truth", "level": "extra_info.level", "tag": "extra_info.tags.0"})
    assert (found.prompt, found.answer) == ("1+1?", "2")
    assert (found.metadata["level"], found.metadata["tag"]) == (3, "a")
    assert found.metadata["extra_info"] == VERL["extra_info"], "structure and nulls stay as they are"


def test_variables_of_the_chat_template_of_a_row_are_refused() -> None:
    """TRL's column had no effect: rows without thinking were written as rows with it."""
    values = {"prompt": "1+1", "answer": "2", "chat_template_kwargs": {"enable_thinking": False}}
    assert "Set renderer.chat_template_kwargs" in refusal(values)
    assert row(values, omit=("chat_template_kwargs",)).prompt == "1+1"


def test_a_usual_name_is_proposed_and_never_taken() -> None:
    said = refusal({"question": "1+1", "solution": "2"})
    assert "there is no column 'prompt'. Did you mean 'question'? Then set task.columns.prompt=question." in said
    assert "The columns are: question, solution." in said
    assert "task.columns.answer=reward_model.ground_truth" in refusal(VERL)
    assert "task.columns.answer=null" in refusal({"prompt": "1+1"})


def test_a_row_needs_no_answer_if_the_map_says_so() -> None:
    assert row({"prompt": "hi"}, {"answer": None}).answer == ""


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_the_thoughts_of_a_message_are_read_by_each_of_their_names(name: str) -> None:
    thoughts = {"reasoning": None, "reasoning_content": None, "thinking": None, name: "7 is odd"}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "odd", **thoughts}]
    found = row({"messages": [*chat, {"role": "user", "content": "8?"}]}, {"answer": None})
    assert found.messages[1].reasoning == "7 is odd"


@pytest.mark.parametrize(
    ("values", "recipe"),
    [
        ({"prompt": "a", "completion": "b"}, "sft"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo"),
        ({"chosen": [], "rejected": []}, "dpo"),
    ],
)
def test_rows_of_another_kind_name_their_recipe(values: dict[str, object], recipe: str) -> None:
    assert f"take the recipe {recipe} (interlace train {recipe}" in refusal(values)
    if recipe == "sft":
        assert row(values, {"answer": "completion"}).answer == "b"


def test_chats_of_share_gpt_are_read() -> None:
    chat = [{"from": "system", "value": "Add."}, {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
    found = row({"conversations": chat}, {"prompt": "conversations", "answer": None})
    assert [(message.role, message.content) for message in found.messages] == [("system", "Add."), ("user", "1+1?")]
    assert found.metadata["completion"] == [{"role": "assistant", "content": "2"}]


def test_text_parts_and_the_role_developer_are_read() -> None:
    chat = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
    ]
    messages = row({"prompt": chat, "answer": "2"}).messages
    assert [(message.role, message.content) for message in messages] == [("system", "Be brief."), ("user", "1+1?")]
    assert "part of type 'image_url'" in refusal(
        {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": ""}
    )


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_of_a_row_are_read_without_the_nulls_of_arrow(tools: object) -> None:
    (tool,) = row({"prompt": "?", "answer": "", "tools": tools}).tools
    assert (tool.name, set(tool.properties)) == ("weather", {"city"})
    assert row({"prompt": "?", "answer": "", "tools": tools}, {"tools": None}).tools == ()
    assert row({"prompt": "?", "answer": "", "tools": None}).tools == ()


def test_what_are_no_tools_is_named() -> None:
    assert "column 'tools' is a int" in refusal({"prompt": "?", "answer": "", "tools": 3})
    assert "column 'tools', tool 1 is" in refusal({"prompt": "?", "answer": "", "tools": ["weather"]})


def test_values_keep_their_type_or_are_refused_by_column_and_row() -> None:
    found = row({"prompt": "?", "answer": np.int64(3), "day": date(2026, 1, 2), "x": np.array([1.5, 2.0]), "no": None})
    assert found.answer == "3"
    assert found.metadata == {"day": "2026-01-02", "x": [1.5, 2.0], "no": None, "answer": 3}
    assert "set:1: column 'picture.bytes' is of type bytes" in refusal(
        {"prompt": "?", "answer": "", "picture": {"bytes": b"x"}}
    )
    assert "set:1: column 'x' is NaN" in refusal({"prompt": "?", "answer": "", "x": float("nan")})
    assert row({"prompt": "?", "answer": "", "x": b"x"}, omit=("x",)).metadata == {}
    assert "an answer must be text or a number" in refusal({"prompt": "?", "answer": ["a"]})


def test_a_value_of_many_levels_is_refused_by_column_and_row() -> None:
    """It was a RecursionError without a row, or came when a reward or an episode copied the row."""
    deep: object = 1
    for _ in range(900):
        deep = [{"a": deep}]
    assert "set:1: column 'tree' has more than 100 levels" in refusal({"prompt": "?", "answer": "", "tree": deep})
