"""The prompt that both completions of a pair begin with, as TRL takes it from them."""

import pytest

from interlace.core.errors import UserError
from interlace.core.types import JSON
from interlace.data.columns import split_pair, to_row
from interlace.data.formatting import Row

USER = {"role": "user", "content": "What color is the sky?"}
BLUE, GREEN = ({"role": "assistant", "content": f"It is {color}."} for color in ("blue", "green"))
MORE = [{"role": "user", "content": "And at night?"}, {"role": "assistant", "content": "Black."}]


def pair_row(values: dict[str, object], columns: dict[str, str | None] | None = None) -> Row:
    return to_row(values, {"answer": None, **(columns or {})}, (), uid="u", origin="set:1", has_completions=True)


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ([USER, BLUE], [USER, GREEN], ([USER], [BLUE], [GREEN])),  # the example of TRL's documentation
        ("The sky is blue.", "The sky is green.", ("The sky is", " blue.", " green.")),
        ([USER, BLUE, *MORE], [USER, BLUE, MORE[0], GREEN], ([USER, BLUE, MORE[0]], [MORE[1]], [GREEN])),
        ([USER, BLUE], [USER, BLUE, *MORE], ([USER], [BLUE], [BLUE, *MORE])),
        ("It is", "It is blue", ("It i", "s", "s blue")),
        ("A: one", "A: ore", ("A: o", "ne", "re")),
    ],
)
def test_the_common_beginning_is_the_prompt_as_in_trl(chosen: JSON, rejected: JSON, expected: tuple[JSON, ...]) -> None:
    assert tuple(split_pair(chosen, rejected, "set:1")) == expected
    data_utils = pytest.importorskip("trl.data_utils")
    theirs = data_utils.extract_prompt({"chosen": chosen, "rejected": rejected})
    assert expected == (theirs["prompt"], theirs["chosen"], theirs["rejected"])


def test_a_row_has_the_prompt_of_its_pair() -> None:
    chats = {"chosen": [USER, BLUE], "rejected": [USER, GREEN]}
    for values in (chats, {"prompt": USER["content"], **chats}):
        row = pair_row(values)
        assert [message.content for message in row.messages] == [USER["content"]] and not row.is_raw
        assert row.metadata["chosen"] == [BLUE] and row.metadata["rejected"] == [GREEN]
    text = pair_row({"good": "Q: 1+1? A: 2", "bad": "Q: 1+1? A: 3"}, {"chosen": "good", "rejected": "bad"})
    assert (text.prompt, text.metadata["chosen"], text.is_raw) == ("Q: 1+1? A:", " 2", True)
    share_gpt = [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]
    assert pair_row({"chosen": share_gpt, "rejected": [share_gpt[0], GREEN]}).prompt == "1"
    kept = pair_row({"prompt": "1", "chosen": [BLUE], "rejected": [GREEN]})
    assert kept.prompt == "1" and kept.metadata["chosen"] == [BLUE]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chosen": "blue", "rejected": "green"}, "begin with different texts, so they have no common prompt"),
        ({"chosen": "", "rejected": "a"}, "no common prompt"),
        ({"chosen": [BLUE], "rejected": [GREEN]}, "begin with different messages"),
        ({"chosen": [USER, BLUE], "rejected": "green"}, "one of `chosen` and `rejected` is text"),
        ({"chosen": [USER, BLUE, *MORE], "rejected": [USER, BLUE, USER, BLUE]}, "message 3 on, which is of the user"),
        ({"chosen": "a b"}, "there is no column 'prompt'"),
    ],
)  # fmt: skip
def test_a_pair_without_a_common_prompt_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pair_row(values)
    with pytest.raises(UserError, match="there is no column 'question'"):
        pair_row(values, {"prompt": "question"})
