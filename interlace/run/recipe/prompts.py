"""Prompts of a recipe, in the form that its episodes need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.messages import Messages, ToolSpec
from interlace.core.types import JSON, Prompt
from interlace.data.formatting import read_prompt
from interlace.data.loading import PromptSet, load_prompts
from interlace.data.rows import Row
from interlace.data.warmup import MessageWriter
from interlace.models.loading import load_tokenizer
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
    styles = {part.label: part.format for part in recipe.task.mixture if part.format is not None}
    return [
        replace(prompt, text=read_prompt(prompt.text, styles.get(prompt.source, recipe.task.format)))
        for prompt in prompts
    ]


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
