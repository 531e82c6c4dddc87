"""Prompts of a recipe, in the form that its episodes and its teacher need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from interlace.core.errors import UserError
from interlace.core.messages import Messages, ToolSpec, to_mapping, tool_mapping
from interlace.core.prompts import plain_text
from interlace.core.types import JSON, Prompt
from interlace.data.config import PromptFormat
from interlace.data.formatting import Row, read_prompt, render, with_last
from interlace.data.loading import PromptSet, load_prompts
from interlace.data.warmup import MessageWriter
from interlace.models.loading import load_tokenizer
from interlace.models.token_text import (
    TypedTags,
    adds_space,
    drop_added_end,
    encode_continuation,
    lossy_text,
    special_tags,
)
from interlace.rollouts.by_row import check_rows, config_of
from interlace.rollouts.config import create_kind
from interlace.rollouts.rendering.examples import ExampleWriter
from interlace.rollouts.rendering.load import create_renderer
from interlace.run.recipe.config import Recipe, is_offline
from interlace.run.recipe.offline_rows import offline_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from interlace.rollouts.rendering.chat_template import Renderer


def renderer_of(
    recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None" = None, stop_token_ids: Sequence[int] = ()
) -> "Renderer | None":
    """Makes the renderer of a recipe's model; None if its prompts are written without a chat template.

    stop_token_ids: tokens that end the model's answers, in addition to the recipe's and the tokenizer's. To write
    prompts, they are not needed.
    """
    if recipe.episode.is_single_turn and not recipe.renderer.chat_template_kwargs and not is_offline(recipe):
        return None
    tokenizer = tokenizer or load_tokenizer(recipe.model)
    if not (recipe.task.format.chat_template and tokenizer.chat_template):
        if recipe.renderer.chat_template_kwargs:
            raise UserError(
                f"renderer.chat_template_kwargs = {dict(recipe.renderer.chat_template_kwargs)}, and no chat template "
                "is applied. Take a tokenizer with a chat template (model.tokenizer) and keep "
                "task.format.chat_template=true, or remove the setting."
            )
        return None
    return create_renderer(tokenizer, recipe.renderer, (*recipe.sampling.stop_token_ids, *stop_token_ids))


def with_instructions(recipe: Recipe, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns prompts whose text is the instruction alone, as in a data set of a robot. Their tokens stay the same."""
    style_of = styles_by_source(recipe)
    return [replace(prompt, text=read_prompt(prompt.text, style_of(prompt))) for prompt in prompts]


def styles_by_source(recipe: Recipe) -> Callable[[Prompt], PromptFormat]:
    """Returns the function from a training prompt to the format of its source."""
    styles = {part.label: part.format for part in recipe.task.mixture if part.format is not None}
    return lambda prompt: styles.get(prompt.source, recipe.task.format)


def recipe_prompts(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None" = None) -> PromptSet:
    """Reads or generates both splits. Raises UserError like load_prompts, and for prompts that no episode can use."""
    tokenizer = tokenizer or load_tokenizer(recipe.model)
    renderer = renderer_of(recipe, tokenizer)
    if is_offline(recipe):
        return offline_prompts(recipe.task, tokenizer, renderer)
    _check_chat(recipe, tokenizer, renderer)
    write_prompt = prompt_writer(recipe, tokenizer)
    if write_prompt is None:
        prompts = load_prompts(recipe.task, tokenizer)
    else:

        def write(messages: Messages, row: Row) -> list[int]:
            if row.tools:
                raise UserError(
                    f"{row.origin}: column 'tools' lists the tools of a row, and the recipe's episode shows the tools "
                    "that it can call. Set task.columns.tools=null, or take episode=single_turn."
                )
            return write_prompt(messages, row.metadata)

        prompts = load_prompts(recipe.task, tokenizer, write)
    check_rows(recipe.episode, [*prompts.train, *prompts.heldout])
    return prompts


def prompt_writer(
    recipe: Recipe, tokenizer: "PreTrainedTokenizerBase"
) -> Callable[[Messages, Mapping[str, JSON]], list[int]] | None:
    """Returns the function from messages and a row's metadata to the tokens of a prompt, tools of the episode included.

    Returns None if prompts are written without a renderer: as plain text, or by the chat template alone.
    """
    renderer = renderer_of(recipe, tokenizer)
    if renderer is None:
        return None
    tools_of = _tools_by_row(recipe)
    return lambda messages, metadata: renderer.render(messages, tools_of(metadata))


def message_writer(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None" = None) -> MessageWriter | None:
    """Returns the writer of a recipe's warm-up examples that are messages; None without a chat template."""
    renderer = renderer_of(recipe, tokenizer)
    if renderer is None:
        return None
    tools_of = _tools_by_row(recipe)
    return ExampleWriter(renderer, lambda prompt: tools_of(prompt.metadata))


def _tools_by_row(recipe: Recipe) -> Callable[[Mapping[str, JSON]], tuple[ToolSpec, ...]]:
    """Returns a function from a row's metadata to the tools of its episode."""
    configs = (recipe.episode, *recipe.episode.others.values())
    shown = {id(config): create_kind(config).tools() for config in configs}
    return lambda row: shown[id(config_of(recipe.episode, row, "a row"))]


def _check_chat(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", renderer: "Renderer | None") -> None:
    """Raises UserError for episodes on messages or with tools if the chat template cannot write them."""
    for config in (recipe.episode, *recipe.episode.others.values()):
        kind = create_kind(config)
        if kind.needs_chat and renderer is None:
            why = "task.format.chat_template=false" if tokenizer.chat_template else "the tokenizer has none"
            raise UserError(
                f"episode {config.name!r} works on messages, which only a chat template can write, and {why}. Take an "
                "instruct model or its tokenizer (model.tokenizer), or another episode."
            )
        if renderer and kind.tools() and not renderer.proof.has_tools:
            raise UserError(
                f"episode {config.name!r} has tools, and the chat template of {recipe.model.path!r} writes none. Set "
                "renderer.tools=prompt, which describes them in the system message, or take a model that knows tools."
            )
        if renderer and kind.tools() and not renderer.proof.reads_calls and recipe.renderer.parser is None:
            raise UserError(
                f"episode {config.name!r} has tools, and no built-in parser reads the calls that the chat template of "
                f"{recipe.model.path!r} writes. Set renderer.parser to your own parser of its format, or "
                "renderer.tools=prompt, which asks for calls in another format."
            )


CHECKED_PROMPTS = 256
"""Prompts, the first ones, whose texts the tokenizers must restore if they are aligned by text."""


def prompt_reader(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> Callable[[Prompt], Prompt] | None:
    """Returns the function from a prompt to the prompt that the teachers read; None if both are equal.

    The context precedes the text of a prompt, after its start token; of a chat, the content of its last message. A chat
    is written as the policy's, with the same tools and variables of the chat template.
    """
    if not recipe.reference.context:
        return None
    write, tags, style_of = prompt_writer(recipe, tokenizer), special_tags(tokenizer), styles_by_source(recipe)
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
                text = encode_continuation(tokenizer, plain_text(prompt, style_of(prompt).system), ids)
            whole = [*prompt.token_ids[:start].tolist(), *ids, *text]
            return replace(prompt, token_ids=np.array(whole, np.int32))
        longer = with_last(prompt.messages, context + prompt.messages[-1].content)
        ids = write(longer, prompt.metadata) if write else _chat_ids(tokenizer, tags, longer, prompt.tools)
        return replace(prompt, token_ids=np.array(ids, np.int32))

    return read


def check_context(recipe: Recipe, prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns the number of tokens that the context of the teachers adds to each prompt.

    Raises UserError if a row has no column that the context names, or if the context is empty for every row.
    """
    read = prompt_reader(recipe, tokenizer)
    if read is None:
        return [0] * len(prompts)
    added = [len(read(prompt).token_ids) - len(prompt.token_ids) for prompt in prompts]
    if max(added) <= 0:
        raise UserError(
            f"reference.context={recipe.reference.context!r} is empty for every row, so that the teacher reads the "
            "prompts of the policy. Name a column that the rows have."
        )
    return added


def text_reader(
    teacher: "PreTrainedTokenizerBase",
    variables: Mapping[str, bool | int | float | str] | None = None,
    style_of: Callable[[Prompt], PromptFormat] = lambda _: PromptFormat(),
) -> Callable[[Prompt], Prompt]:
    """Returns the function from a prompt to the prompt in the tokens of a teacher with another tokenizer.

    A chat is written with the teacher's chat template and the tools of its row, if the teacher has a template; other
    prompts are their text after the recipe's system message. variables: of the chat template, as for the policy.
    style_of: returns the format of a prompt.
    """
    tags = special_tags(teacher)

    def read(prompt: Prompt) -> Prompt:
        if prompt.messages and teacher.chat_template:
            ids = _chat_ids(teacher, tags, prompt.messages, prompt.tools, variables)
            return replace(prompt, token_ids=np.array(ids, np.int32))
        text = plain_text(prompt, style_of(prompt).system)
        ids = drop_added_end(teacher, text, teacher(text)["input_ids"])
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
