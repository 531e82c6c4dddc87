"""A teacher with another tokenizer: its log-probs equal those of plain transformers, summed over common text."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from interlace.core.messages import Message
from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.engines.train import LogprobEngine, TrainConfig
from interlace.engines.train.text_teacher import TextTeacherEngine, Tokenizers
from interlace.models.tiny import build_tokenizer
from interlace.run.recipe.prompts import text_reader
from tests.support.tokenizers import merging_tokenizer, spacing_tokenizer

STUDENT, TEACHER = build_tokenizer(256), merging_tokenizer()


def model(size: int, context: int = 128) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=context, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def sample(prompt: str, response: str, *, ends: bool = True) -> Sample:
    ids = [*STUDENT(response, add_special_tokens=False)["input_ids"], *([STUDENT.eos_token_id] if ends else [])]
    prompt_ids = np.array(STUDENT(prompt)["input_ids"], np.int32)
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 10
    return Sample(
        key=SampleKey(0, 0),
        prompt=Prompt(uid="a", token_ids=prompt_ids, text=prompt, answer=""),
        segments=(Segment(token_ids=np.array(ids, np.int32), logprobs=logprobs),),
    )


def teacher(network: LlamaForCausalLM, other: object = TEACHER) -> TextTeacherEngine:
    tokenizers = Tokenizers(student=STUDENT, teacher=other)  # type: ignore[arg-type]
    return TextTeacherEngine(network, config=TrainConfig(), tokenizers=tokenizers, read=text_reader(other))  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", [True, False])
def test_the_log_prob_of_a_response_is_that_of_its_text(ends: bool) -> None:
    prompt, response = "5 3 9>", "<answer>359</answer> the quick 日本"
    found = teacher(model(len(TEACHER))).logprobs([sample(prompt, response, ends=ends), sample(prompt, "x", ends=ends)])
    prompt_ids, ids = TEACHER(prompt)["input_ids"], TEACHER(response, add_special_tokens=False)["input_ids"]
    ids = [*ids, *([TEACHER.eos_token_id] if ends else [])]
    with torch.no_grad():
        logprobs = model(len(TEACHER))(torch.tensor([prompt_ids + ids])).logits[0].log_softmax(-1)
    places = range(len(prompt_ids) - 1, len(prompt_ids) + len(ids) - 1)
    expected = [float(logprobs[place, token]) for place, token in zip(places, ids, strict=True)]
    assert len(found[0]) == sample(prompt, response, ends=ends).num_tokens > len(ids)
    assert found[0].sum() == pytest.approx(sum(expected), rel=1e-5)
    if ends:
        assert found[0][-1] == pytest.approx(expected[-1], rel=1e-4), "the ends are aligned"
    gaps = found[0] - sample(prompt, response, ends=ends).logprobs
    assert len(np.unique(gaps.round(4))) < len(gaps), "tokens of a group share its difference"


def test_an_answer_of_a_chat_ends_with_the_token_of_the_teachers_turns() -> None:
    """Gemma's turns end with <end_of_turn>, and its tokenizer's end token never follows them."""
    other = merging_tokenizer()
    other.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    other.chat_template = "{% for m in messages %}{{ m.content }}<end_of_turn>{% endfor %}"
    asked = replace(sample("", "").prompt, messages=(Message(role="user", content="hi"),))
    end = other.convert_tokens_to_ids("<end_of_turn>")
    prompt_ids = other("hi<end_of_turn>")["input_ids"]
    ids = other("359", add_special_tokens=False)["input_ids"]
    (found,) = teacher(model(len(other)), other).logprobs([replace(sample("", "359"), prompt=asked)])
    with torch.no_grad():
        logprobs = model(len(other))(torch.tensor([prompt_ids + ids])).logits[0, -1].log_softmax(-1)
    assert found[-1] == pytest.approx(float(logprobs[end]), rel=1e-4)


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("response", ["yes", " yes"])
def test_a_tokenizer_that_puts_a_space_before_each_text_puts_none_before_a_response(kind: str, response: str) -> None:
    other = spacing_tokenizer(kind)
    prompt = "is it?"
    (found,) = teacher(model(len(other)), other).logprobs([sample(prompt, response, ends=False)])
    prompt_ids, ids = (other(text, add_special_tokens=False)["input_ids"] for text in (prompt, prompt + response))
    assert ids[: len(prompt_ids)] == prompt_ids
    with torch.no_grad():
        logprobs = model(len(other))(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = sum(float(logprobs[place - 1, ids[place]]) for place in range(len(prompt_ids), len(ids)))
    assert found.sum() == pytest.approx(expected, rel=1e-4)


def test_a_space_of_a_student_that_its_decoder_removes_is_in_the_text() -> None:
    student = spacing_tokenizer("t5")
    prompt_ids, ids = (np.array(student(text)["input_ids"], np.int32) for text in ("is it?", "is it? yes"))
    made = ids[len(prompt_ids) :]
    prompt = replace(sample("is it?", "").prompt, token_ids=prompt_ids)
    segment = Segment(token_ids=made, logprobs=np.zeros(len(made), np.float32))
    tokenizers = Tokenizers(student=student, teacher=TEACHER)
    engine = TextTeacherEngine(
        model(len(TEACHER)), config=TrainConfig(), tokenizers=tokenizers, read=text_reader(TEACHER)
    )
    (found,) = engine.logprobs([Sample(key=SampleKey(0, 0), prompt=prompt, segments=(segment,))])
    (expected,) = teacher(model(len(TEACHER))).logprobs([sample("is it?", " yes", ends=False)])
    assert found.sum() == pytest.approx(expected.sum(), rel=1e-5)


def test_an_answer_gets_the_space_that_the_teachers_chat_template_writes() -> None:
    other = spacing_tokenizer("t5")
    other.chat_template = "{% for m in messages %}{{ m.content }}]{% endfor %}"
    asked = replace(
        sample("", "yes", ends=False),
        prompt=replace(sample("", "").prompt, messages=(Message(role="user", content="a"),)),
    )
    found = [
        TextTeacherEngine(
            model(len(other)),
            config=TrainConfig(),
            tokenizers=Tokenizers(student=STUDENT, teacher=other, spaces_answers=is_spaced),
            read=text_reader(other),
        )
        .logprobs([asked])[0]
        .sum()
        for is_spaced in (False, True)
    ]
    before = other("a]", add_special_tokens=False)["input_ids"]
    for ours, text in zip(found, ("a]yes", "a] yes"), strict=True):
        ids = other(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logprobs = model(len(other))(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(float(logprobs[place - 1, ids[place]]) for place in range(len(before), len(ids)))
        assert ours == pytest.approx(expected, rel=1e-4)


def test_with_the_same_tokenizer_it_equals_the_ordinary_engine() -> None:
    samples = [sample("1 2>", "<answer>12</answer>"), sample("9>", "abc", ends=False)]
    plain = LogprobEngine(model(len(STUDENT)), config=TrainConfig()).logprobs(samples)
    for ours, theirs in zip(teacher(model(len(STUDENT)), STUDENT).logprobs(samples), plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_text_beyond_the_teacher_s_context_and_empty_text_give_no_signal() -> None:
    long = sample("1>", "abc" * 20)
    (found,) = teacher(model(len(TEACHER), context=16)).logprobs([long])
    assert (found[:5] != long.logprobs[:5]).any() and (found[-5:] == long.logprobs[-5:]).all()
    empty = replace(long, segments=(Segment(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32)),))
    assert len(teacher(model(len(TEACHER))).logprobs([empty])[0]) == 0
