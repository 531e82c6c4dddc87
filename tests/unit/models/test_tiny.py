"""Tiny models are complete: any text survives the tokenizer, a seed determines the weights, and they save and load."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.models.tiny import TAGS, build_tiny, build_tokenizer

TOKENIZER = build_tokenizer(1024)


@given(st.lists(st.one_of(st.text(), st.sampled_from(TAGS))).map("".join))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_digits_and_tags_are_one_token_each() -> None:
    ids = TOKENIZER("<think>0,44</think><answer>4</answer>")["input_ids"]
    assert len(ids) == 9
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>0,44</think><answer>4</answer>"


def test_pad_and_end_are_special_and_apart() -> None:
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id
    ids = [*TOKENIZER("a")["input_ids"], TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "a"


def test_a_seed_fixes_the_weights_and_leaves_torch_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, _ = build_tiny("micro", 0)
    assert torch.equal(torch.rand(1), expected)
    second, _ = build_tiny("micro", 0)
    third, _ = build_tiny("micro", 1)
    weights = [model.state_dict()["model.layers.0.mlp.up_proj.weight"] for model in (first, second, third)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_saved_tiny_model_loads_as_a_folder(tmp_path: Path) -> None:
    built = load_model(ModelConfig(path="tiny:micro"))
    built.model.save_pretrained(tmp_path)
    built.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(path=str(tmp_path)))
    ids = torch.tensor([built.tokenizer("70495>")["input_ids"]])
    with torch.inference_mode():
        assert torch.equal(built.model(ids).logits, loaded.model(ids).logits)
    assert loaded.tokenizer("<think>é</think>")["input_ids"] == built.tokenizer("<think>é</think>")["input_ids"]
    assert loaded.stop_token_ids == built.stop_token_ids == (built.tokenizer.eos_token_id,)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UserError, match=r"tiny model 'micr'. Did you mean 'micro'\? Known: micro, micro-chat, mini"):
        load_model(ModelConfig(path="tiny:micr"))
