"""Tokenizers of SentencePiece put a space before each text, which text that follows other text does not get."""

import pytest

from interlace.core.messages import Message
from interlace.rollouts.rendering.config import RendererConfig
from interlace.rollouts.rendering.load import create_renderer
from tests.support.tokenizers import spacing_tokenizer


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_text_after_an_answer_begins_without_a_space_of_the_tokenizer(kind: str) -> None:
    tokenizer = spacing_tokenizer(kind)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}"
    renderer = create_renderer(tokenizer, RendererConfig())
    asked, new = Message(role="user", content="a"), Message(role="user", content="b")
    answered = [*renderer.render([asked]), *tokenizer.convert_tokens_to_ids(["y", "e", "s"])]
    longer = renderer.extend(answered, Message(role="assistant", content="yes"), [new])
    assert longer is not None and tokenizer.decode(longer) == "a\nyes\nb\n"
