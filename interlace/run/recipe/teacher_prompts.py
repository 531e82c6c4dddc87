"""Prompts that a teacher reads: the prompts of the policy after an additional context."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from interlace.core.errors import UserError
from interlace.core.messages import Messages, ToolSpec, to_mapping, tool_mapping
from interlace.core.types import Prompt
from interlace.data.chat import with_last
from interlace.data.config import PromptFormat
from interlace.data.formatting import render
from interlace.data.rows import Row
from interlace.models.loading import load_tokenizer
from interlace.models.token_text import adds_space, drop_added_end, encode_continuation, lossy_text
from interlace.models.typed_tags import TypedTags, special_tags
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.prompts import prompt_writer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKED_PROMPTS = 256
"""Prompts, the first ones, whose texts the tokenizers must restore if they are aligned by text."""


def prompt_reader(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> Callable[[Prompt], Prompt] | None:
    """Returns the function from a prompt to the prompt that the teachers read; None if both are equal.

    The context precedes the text of a prompt, after its start token; of a chat, the content of its last message. A chat
    is written as the policy's, with the same tools and variables of the chat template.
    """
    if not recipe.reference.context:
        return None
    write, tags = prompt_writer(recipe, tokenizer), special_tags(tokenizer)
    style = PromptFormat(template=recipe.reference.context)

    def read(prompt: Prompt) -> Prompt:
        row = Row(
            uid=prompt.uid,
            origin=f"row {prompt.uid}",
            prompt=prompt.text,
            answer=prompt.answer,
            metadata={**prompt.metadata, "answer": prompt.answer},
        )
        context = render(row, style)
        if not prompt.messages:
            ids = tokenizer(context, add_special_tokens=False)["input_ids"]
            start = _count_start_tokens(tokenizer, prompt)
            text = prompt.token_ids[start:].tolist()
            if ids and adds_space(tokenizer):
                text = encode_continuation(tokenizer, prompt.text, ids)
            whole = [*prompt.token_ids[:start].tolist(), *ids, *text]
            return replace(prompt, token_ids=np.array(whole, np.int32))
        longer = with_last(prompt.messages, context + prompt.messages[-1].content)
        ids = write(longer, prompt.metadata) if write else _chat_ids(tokenizer, tags, longer, prompt.tools)
        return replace(prompt, token_ids=np.array(ids, np.int32))

    return read


def check_context(recipe: Recipe, prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises UserError if a row has no column that the context names, or if the context is empty for every row."""
    read = prompt_reader(recipe, tokenizer)
    if read is None:
        return
    is_longer = [len(read(prompt).token_ids) > len(prompt.token_ids) for prompt in prompts]  # reads every row
    if not any(is_longer):
        raise UserError(
            f"reference.context={recipe.reference.context!r} is empty for every row, so that the teacher reads the "
            "prompts of the policy. Name a column that the rows have."
        )


def text_reader(
    teacher: "PreTrainedTokenizerBase", variables: Mapping[str, bool | int | float | str] | None = None
) -> Callable[[Prompt], Prompt]:
    """Returns the function from a prompt to the prompt in the tokens of a teacher with another tokenizer.

    A chat is written with the teacher's chat template and the tools of its row, if the teacher has a template; other
    prompts are their text. variables: of the chat template, as for the policy.
    """
    tags = special_tags(teacher)

    def read(prompt: Prompt) -> Prompt:
        if prompt.messages and teacher.chat_template:
            ids = _chat_ids(teacher, tags, prompt.messages, prompt.tools, variables)
            return replace(prompt, token_ids=np.array(ids, np.int32))
        ids = drop_added_end(teacher, prompt.text, teacher(prompt.text)["input_ids"])
        return replace(prompt, token_ids=np.array(ids, np.int32))

    return read


def writes_space(
    tokenizer: "PreTrainedTokenizerBase", variables: Mapping[str, bool | int | float | str] | None = None
) -> bool:
    """Returns whether a chat template writes a space between the start of the assistant's turn and its answer."""
    from interlace.data.chat_template_limits import ChatTemplateError, render_chat  # imports jinja

    if not tokenizer.chat_template:
        return False
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        begin = render_chat(tokenizer, turns[:1], add_generation_prompt=True, variables=variables)
        whole = render_chat(tokenizer, turns, add_generation_prompt=False, variables=variables)
    except ChatTemplateError:  # the template needs other messages
        return False
    return whole.startswith(f"{begin} b")


def check_alignment(recipe: Recipe, prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises UserError if the text of the policy cannot be aligned with the tokens of a teacher with another tokenizer.

    Both tokenizers must restore the text of each prompt and answer.
    """
    other = recipe.reference.model
    if recipe.reference.align != "text" or other is None:
        return
    teacher = load_tokenizer(other)
    texts = [text for prompt in prompts[:CHECKED_PROMPTS] for text in (prompt.text, prompt.answer) if text]
    for key, path, each in (("model", recipe.model.path, tokenizer), ("reference.model", other.path, teacher)):
        if lossy := lossy_text(each, texts):
            before, after = (repr(text[:80]) for text in lossy)
            raise UserError(
                f"reference.align=text: the tokenizer of {key} = {path!r} does not restore the text of the task "
                f"({before} becomes {after}), so no tokens of policy and teacher have a common text. Take a teacher "
                "whose tokenizer restores it."
            )


def _count_start_tokens(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt) -> int:
    """Counts the special tokens with which the tokenizer begins a text, such as <s>, at the start of a prompt."""
    special = tokenizer("")["input_ids"]
    pairs = zip(special, prompt.token_ids.tolist(), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _chat_ids(
    tokenizer: "PreTrainedTokenizerBase",
    tags: TypedTags,
    messages: Messages,
    tools: Sequence[ToolSpec] = (),
    variables: Mapping[str, bool | int | float | str] | None = None,
) -> list[int]:
    from interlace.data.chat_template_limits import render_chat  # imports jinja

    written = [tags.hold_message(to_mapping(message)) for message in messages]
    shown = [tool_mapping(tool) for tool in tools] or None
    text = render_chat(tokenizer, written, tools=shown, add_generation_prompt=True, variables=variables)
    return tags.encode(text)
