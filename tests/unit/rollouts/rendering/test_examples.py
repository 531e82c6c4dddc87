"""Examples of conversations are written whole, or refused."""

import copy

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolCall
from interlace.core.types import Prompt
from interlace.rollouts.rendering.config import RendererConfig
from interlace.rollouts.rendering.examples import ExampleWriter
from interlace.rollouts.rendering.load import create_renderer
from tests.support.chat_templates import PLAIN_TEMPLATE, tokenizer_of
from tests.support.conversations import TOOLS


@pytest.mark.parametrize(("name", "thoughts", "call"), [("qwen3", True, True), ("llama3_1", False, True)])
def test_an_example_whose_thoughts_or_calls_the_template_leaves_out_is_refused(
    name: str, thoughts: bool, call: bool
) -> None:
    """SFT trained on the answer without them, for a call on an empty answer."""
    prompt = Prompt(
        uid="x", token_ids=np.ones(1, np.int32), text="", answer="", messages=(Message(role="user", content="x"),)
    )
    called = ToolCall(id="000000001", name="now", arguments={})
    answers = {
        "thoughts": (Message(role="assistant", content="y", reasoning="hm"), thoughts),
        "calls": (Message(role="assistant", content="", tool_calls=(called,)), call),
    }
    without = copy.deepcopy(tokenizer_of("own"))
    without.chat_template = PLAIN_TEMPLATE
    for part, (answer, is_written) in answers.items():
        writer = ExampleWriter(create_renderer(tokenizer_of(name), RendererConfig()), lambda _: TOOLS)
        if is_written:
            assert writer.write(prompt, [answer])[0]
        for refuses in (
            create_renderer(without, RendererConfig()),
            *([] if is_written else [create_renderer(tokenizer_of(name), RendererConfig())]),
        ):
            with pytest.raises(UserError, match=f"example for x: .* leaves out the {part} of an answer"):
                ExampleWriter(refuses, lambda _: ()).write(prompt, [answer])


def test_thoughts_are_written_by_a_template_that_refuses_an_answer_without_them() -> None:
    renderer = create_renderer(tokenizer_of("nemotron_3_nano"), RendererConfig())
    said, answer = [Message(role="user", content="x")], Message(role="assistant", content="y", reasoning="hm")
    renderer.check_written(said, answer, (), renderer.answer(said, answer))
