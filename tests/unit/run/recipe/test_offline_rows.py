"""Rows of SFT and DPO as tokens."""

from collections.abc import Sequence

import numpy as np
import pytest

from interlace.algorithms.base import RowKind
from interlace.core.errors import UserError
from interlace.core.messages import Message
from interlace.core.types import JSON, Prompt
from interlace.models.config import ModelConfig
from interlace.models.loading import load_tokenizer
from interlace.rollouts.rendering.config import RendererConfig
from interlace.rollouts.rendering.load import create_renderer
from interlace.run.recipe.offline_rows import RowEncoder
from tests.support.tokenizers import spacing_tokenizer

PLAIN, CHAT = (load_tokenizer(ModelConfig(path=path)) for path in ("tiny:micro", "tiny:micro-chat"))


def make_row(ids: Sequence[int], *messages: Message, **columns: JSON) -> Prompt:
    return Prompt(
        uid="rows/1", token_ids=np.array(ids, np.int32), text="", answer="", messages=messages, metadata=columns
    )


def test_a_completion_has_one_end_token_also_if_its_row_ends_with_it() -> None:
    """Data for trainers that add no end token has it in the text; the model would learn to write it twice."""
    encoder = RowEncoder(kind="demonstrations", tokenizer=PLAIN, renderer=None, demonstrator=None)

    def encode(completion: str) -> list[int]:
        found: list[int] = encoder.encode(make_row([5, 6], completion=completion)).token_ids.tolist()
        return found

    assert encode("yes") == encode(f"yes{PLAIN.eos_token}") == [*PLAIN("yes")["input_ids"], PLAIN.eos_token_id]


@pytest.mark.parametrize("kind", ["demonstrations", "pairs"])
def test_rows_for_kto_without_pairs_are_refused(kind: RowKind) -> None:
    """SFT imitated the completions that are labelled as wrong, and DPO advised to take SFT."""
    encoder = RowEncoder(kind=kind, tokenizer=PLAIN, renderer=None, demonstrator=None)
    with pytest.raises(UserError, match=r"the column `label` with true or false, .* algorithm.loss=kto"):
        encoder.encode(make_row([5, 6], completion="no", label=False))


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_completion_continues_its_prompt_without_a_space_of_the_tokenizer(kind: str) -> None:
    """Tokenizers of SentencePiece put a space before each text, which the model learned to write before its answers."""
    tokenizer = spacing_tokenizer(kind)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + (eos_token if m.role == 'assistant' else '\n') }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    chat = create_renderer(tokenizer, RendererConfig())
    asked, said = Message(role="user", content="a<end>b"), Message(role="assistant", content="yes")

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    for renderer, before, written in ((None, "1+1=", "yes"), (None, "is it?", " yes"), (chat, "", "yes")):
        encoder = RowEncoder(kind="demonstrations", tokenizer=tokenizer, renderer=renderer, demonstrator=None)
        messages = () if renderer is None else (asked,)
        ids = encode(before) if renderer is None else renderer.render(messages)
        whole = [*ids, *encoder.encode(make_row(ids, *messages, completion=written)).token_ids.tolist()]
        text = f"{before}{written}<end>" if renderer is None else "user: a<end>b\nassistant: yes<end>"
        assert tokenizer.decode(whole) == text
        if renderer is None:
            assert whole == encode(text)
    assert chat.answer([asked], said)[0] == encode("yes")[0]


def test_a_completion_that_continues_after_the_end_of_its_turn_is_refused() -> None:
    """It was cut there, and only its beginning was trained. A tag at the end of the text is the end of the turn."""
    renderer = create_renderer(CHAT, RendererConfig())
    encoder = RowEncoder(kind="demonstrations", tokenizer=CHAT, renderer=renderer, demonstrator=None)
    messages = (Message(role="user", content="hi"),)

    def encode(completion: str) -> str:
        row = make_row(renderer.render(messages), *messages, completion=completion)
        return str(CHAT.decode(encoder.encode(row).token_ids.tolist()))

    assert encode("yes") == encode("yes<|im_end|>") == encode("yes<|im_end|>\n") == "yes<|im_end|>"
    with pytest.raises(UserError, match=r"rows/1: the text of an answer continues after '<\|im_end\|>'"):
        encode("yes<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\nno")


def test_only_messages_of_the_assistant_are_compared_in_a_pair() -> None:
    """Completions of several messages have messages of users and tools, which the policy does not write."""
    renderer = create_renderer(CHAT, RendererConfig())
    encoder = RowEncoder(kind="pairs", tokenizer=CHAT, renderer=renderer, demonstrator=None)
    asked = (Message(role="user", content="hi"),)

    def chat(*texts: str) -> list[dict[str, str]]:
        roles = ("assistant", "user", "assistant")
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]

    chosen, rejected = chat("a", "b", "c"), chat("d", "e", "f")
    sample = encoder.encode(make_row(renderer.render(asked), *asked, chosen=chosen, rejected=rejected))
    assert sample.loss_mask is not None and CHAT.decode(sample.token_ids[sample.loss_mask]) == (
        "a<|im_end|>c<|im_end|>d<|im_end|>f<|im_end|>"
    )
