"""The splits of a source have disjoint and distinct texts, and are always the same."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from interlace.core.errors import UserError
from interlace.data.config import DataConfig
from interlace.data.loading import PromptSet, load_prompts
from interlace.models.tiny import build_tokenizer

SORTING: Mapping[str, object] = {
    "name": "number_sorting",
    "parameters": {"min_numbers": 3, "max_numbers": 5, "max_decimals": 0, "min_value": 0, "max_value": 9},
    "train_size": 300,
    "heldout_size": 100,
}
COMPACT: Mapping[str, object] = {
    "template": "{original_numbers}{direction}",
    "replace": {".0": "", "ascending": "<", "descending": ">"},
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(1024)


def load(tokenizer: PreTrainedTokenizerBase, **data: object) -> PromptSet:
    return load_prompts(DataConfig.parse(data), tokenizer)


def texts(found: PromptSet) -> tuple[list[str], list[str]]:
    return [prompt.text for prompt in found.train], [prompt.text for prompt in found.heldout]


def test_generated_prompts_are_distinct_and_the_splits_disjoint(tokenizer: PreTrainedTokenizerBase) -> None:
    train, heldout = texts(load(tokenizer, reasoning_gym=SORTING, format=COMPACT))
    assert (len(train), len(heldout)) == (300, 100)
    assert len({*train, *heldout}) == 400
    assert all(text[:-1].isdigit() and text[-1] in "<>" for text in train)


def test_generated_prompts_depend_on_their_settings_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    first = load(tokenizer, reasoning_gym=SORTING, format=COMPACT)
    assert texts(first) == texts(load(tokenizer, reasoning_gym=SORTING, format=COMPACT))
    uids = {prompt.uid for prompt in (*first.train, *first.heldout)}
    assert len(uids) == 400
    other = load(tokenizer, reasoning_gym={**SORTING, "seed": 1}, format=COMPACT)
    assert texts(first)[1] != texts(other)[1]


def test_too_few_distinct_prompts_are_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    few = {**SORTING, "parameters": {"min_numbers": 1, "max_numbers": 1, "max_decimals": 0, "min_value": 0}}
    with pytest.raises(UserError, match="distinct prompts in addition to 0 held-out ones, and 100 are needed"):
        load(tokenizer, reasoning_gym={**few, "parameters": {**few["parameters"], "max_value": 9}}, format=COMPACT)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "number_sortin"}, "Did you mean 'number_sorting'"),
        ({"parameters": {"min_number": 3}}, "unknown parameter 'min_number'.*Did you mean 'min_numbers'"),
        ({"parameters": {"seed": 3}}, "unknown parameter 'seed'"),
        ({"parameters": {"min_numbers": 30}}, "refuses its parameters .*max_numbers must be >= min_numbers"),
    ],
)
def test_mistakes_in_a_generated_source(
    tokenizer: PreTrainedTokenizerBase, change: Mapping[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(tokenizer, reasoning_gym={**SORTING, **change})


def write(folder: Path, name: str, *prompts: str) -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": prompt}) + "\n" for prompt in prompts))
    return str(path)


def test_a_heldout_file_takes_its_prompts_out_of_training(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    train, heldout = write(tmp_path, "a.jsonl", "x", "y", "z", "y"), write(tmp_path, "b.jsonl", "x", "w")
    found = load(tokenizer, files={"train": train, "heldout": heldout})
    assert texts(found) == (["y", "z", "y"], ["x", "w"])


def test_rows_kept_back_leave_training_with_their_repetitions(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write(tmp_path, "a.jsonl", *(str(number % 20) for number in range(60)))
    train, heldout = texts(load(tokenizer, files={"train": path, "heldout_size": 5}))
    assert len(set(heldout)) == len(heldout) == 5
    assert len(train) == 45
    assert set(train).isdisjoint(heldout)


def test_nothing_left_to_train_on_is_an_error(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", "x", "y", "y")
    with pytest.raises(UserError, match="2 distinct prompts, heldout_size=2"):
        load(tokenizer, files={"train": path, "heldout_size": 2})
    with pytest.raises(UserError, match="none is left to train on"):
        load(tokenizer, files={"train": path, "heldout": path})


def test_a_config_has_one_source(tmp_path: Path) -> None:
    files = {"train": "a.jsonl"}
    for data in ({}, {"reasoning_gym": SORTING, "files": files}):
        with pytest.raises(UserError, match="give one source of prompts"):
            DataConfig.parse(data)
    with pytest.raises(UserError, match="remove one of them"):
        DataConfig.parse({"files": {**files, "heldout": "b.jsonl", "heldout_size": 3}})
    with pytest.raises(UserError, match=r"unknown key 'files.trian'.*Did you mean 'train'"):
        DataConfig.parse({"files": {"trian": "a.jsonl"}})


def test_chats_that_end_alike_are_two_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    def chat(first: str) -> list[dict[str, str]]:
        says = zip(("user", "assistant", "user"), (first, "Yes.", "And now?"), strict=True)
        return [{"role": role, "content": content} for role, content in says]

    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat(text), "answer": "1"}) + "\n" for text in "abcabc"))
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    found = load(tokenizer, files={"train": str(file), "heldout_size": 1})
    train, heldout = texts(found)
    assert len(heldout) == 1 and len(train) == 4 and len(set(train)) == 2 and not set(train) & set(heldout)
