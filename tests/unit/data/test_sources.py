"""Several sources, several held-out sets and overlong prompts are handled."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from interlace.core.errors import UserError
from interlace.data.config import DataConfig
from interlace.data.loading import PromptSet, load_prompts
from interlace.models.tiny import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(1024)


def file(folder: Path, name: str, *texts: str) -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    return str(path)


def load(tokenizer: PreTrainedTokenizerBase, data: object) -> PromptSet:
    config = DataConfig.parse({"mixture": data} if isinstance(data, list) else data)  # type: ignore[arg-type]
    return load_prompts(config, tokenizer)


def test_prompts_of_a_mixture_carry_their_source(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first, second = file(tmp_path, "a.jsonl", "a", "b", "c"), file(tmp_path, "b.jsonl", "c", "d")
    parts = [{"source": first, "files": {"train": first, "heldout_size": 1}}, {"source": second, "name": "two"}]
    found = load(tokenizer, parts)
    assert {prompt.source for prompt in found.train} == {"a", "two"}
    assert all(prompt.uid.startswith(f"{prompt.source}/") for prompt in found.train)
    assert [prompt.source for prompt in found.heldout] == ["a"]
    assert found.heldout[0].text not in {prompt.text for prompt in found.train}, "over all sources"


def test_held_out_sets_have_names_and_are_never_trained_on(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    train, hard = file(tmp_path, "train.jsonl", "a", "b", "c"), file(tmp_path, "hard.jsonl", "c", "d", "e")
    found = load(tokenizer, {"files": {"train": train}, "heldout_sets": {"hard": hard}})
    assert [prompt.text for prompt in found.train] == ["a", "b"]
    assert [(prompt.source, prompt.text) for prompt in found.first_of_each_set(2)] == [("hard", "c"), ("hard", "d")]


def test_a_held_out_question_is_never_trained_on_in_another_format(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    train, hard = file(tmp_path, "train.jsonl", "a", "b", "c"), file(tmp_path, "hard.jsonl", "c", "d")
    sets = {"hard": {"files": {"train": hard}, "format": {"template": "Q: {prompt}"}}}
    assert [prompt.text for prompt in load(tokenizer, {"files": {"train": train}, "heldout_sets": sets}).train] == [
        "a", "b",
    ]  # fmt: skip
    sources = [
        {"name": "short", "files": {"train": train, "heldout_size": 1}},
        {"name": "long", "files": {"train": train}, "format": {"template": "{prompt}? Think."}},
    ]
    found = load(tokenizer, sources)
    [held] = found.heldout
    assert {prompt.text for prompt in found.train} & {held.text, f"{held.text}? Think."} == set()
    assert len(found.train) == 4
    rows = [{"prompt": text, "answer": "1", "level": 1} for text in "cd"]
    (tmp_path / "levels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    levels = {
        "files": {"train": str(tmp_path / "levels.jsonl")},
        "format": {"template": "{level}: {prompt}"},
        "heldout_sets": {"hard": {"files": {"train": hard}, "format": {"template": "{prompt}"}}},
    }
    assert len(load(tokenizer, levels).train) == 2, "a row of the set has no column `level`, so it is no such prompt"


def test_a_source_of_which_every_prompt_is_held_out_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    first, second = file(tmp_path, "a.jsonl", "a", "b"), file(tmp_path, "b.jsonl", "c", "d")
    data = {"mixture": [{"source": first}, {"source": second}], "heldout_sets": {"hard": second}}
    with pytest.raises(UserError, match=r"source 'b' of task.mixture has no prompt to train on"):
        load(tokenizer, data)


def test_a_held_out_set_with_the_name_of_other_held_out_prompts_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Their accuracies would be one, of the prompts of both."""
    first, second = file(tmp_path, "a.jsonl", "a", "b", "c"), file(tmp_path, "b.jsonl", "d")
    single = {"files": {"train": first, "heldout_size": 1}, "heldout_sets": {"task": second}}
    with pytest.raises(UserError, match=r"task.heldout_sets.task: the task \(its own are the set 'task'\) holds out"):
        load(tokenizer, single)
    source = {"name": "a", "files": {"train": first, "heldout_size": 1}}
    with pytest.raises(UserError, match=r"task.heldout_sets.a: the source 'a' of task.mixture holds out prompts too"):
        load(tokenizer, {"mixture": [source], "heldout_sets": {"a": second}})
    whole = {"mixture": [{**source, "files": {"train": first}}], "heldout_sets": {"a": second, "task": second}}
    assert sorted(prompt.source for prompt in load(tokenizer, whole).heldout) == ["a", "task"]


def test_prompts_that_are_too_long_are_refused_or_dropped_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = {"files": {"train": file(tmp_path, "a.jsonl", "a", "b" * 30, "c" * 40)}, "max_prompt_tokens": 20}
    with pytest.raises(UserError, match=r"a.jsonl:2: the prompt has 30 tokens, more than task.max_prompt_tokens=20"):
        load(tokenizer, data)
    found = load(tokenizer, {**data, "overlong": "drop"})
    assert ([prompt.text for prompt in found.train], dict(found.dropped)) == (["a"], {"": 2})
    with pytest.raises(
        UserError, match=r"no prompt is left to train on: 3 were dropped as longer than max_prompt_tokens\. Raise"
    ):
        load(tokenizer, {**data, "overlong": "drop", "files": {"train": file(tmp_path, "b.jsonl", *["x" * 30] * 3)}})


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"files": {"train": "a"}, "hub": {"name": "a/b"}}, "files and hub are given"),
        ({}, "none is given"),
        ({"mixture": [{"source": "a.csv"}, {"source": "x/a.csv"}]}, "two sources of mixture have the name 'a'"),
        ({"mixture": [{"source": "a.csv"}], "files": {"train": "a"}}, "one source or a mixture"),
        ({"mixture": [{"weight": 1}]}, "none is given"),
        ({"mixture": [{"source": "a.csv", "weight": 0}]}, "one needs a larger weight"),
        ({"reasoning_gym": {"name": "x"}, "columns": {"prompt": "q"}}, "columns and omit belong to tables"),
        ({"files": {"train": "a"}, "overlong": "drop"}, "overlong=drop needs max_prompt_tokens"),
        ({"files": {"train": "a"}, "columns": {"prompt": None}}, "every row needs a prompt"),
        ({"hub": {"name": "a/b", "streaming": True}}, "streaming needs a limit"),
        ({"files": {"train": "a", "heldout": "b", "heldout_size": 3}}, "remove one of them"),
    ],
)
def test_sources_that_contradict_themselves_are_refused(data: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        DataConfig.parse(data)


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("number_sorting", "reasoning_gym"), ("a.csv", "files"), ("x/a.PARQUET", "files"), ("./folder", "files"),
        ("openai/gsm8k", "hub"), ("hub:x", "hub"),
    ],
)  # fmt: skip
def test_one_word_names_a_source_of_each_kind(word: str, kind: str) -> None:
    config = DataConfig.parse({"source": word})
    assert getattr(config, kind) is not None
