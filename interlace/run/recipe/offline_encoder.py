"""The rows of a recipe that trains on given rows, as samples."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from interlace.algorithms.offline import OfflineAlgorithm
from interlace.core.errors import UserError
from interlace.core.types import Prompt, Sample
from interlace.data.warmup import load_demonstrator
from interlace.models.loading import load_tokenizer
from interlace.models.token_text import special_tags
from interlace.rewards.classifier import encode_scored
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.run.recipe.offline_rows import RowEncoder
from interlace.run.recipe.prompts import renderer_of, styles_by_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_checked: list[tuple[weakref.ref[Recipe], Mapping[str, Sample]]] = []
"""The recipe that was checked last, as long as it exists, and the samples of its rows by uid."""


def encode_checked_rows(
    recipe: Recipe, prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase"
) -> list[Sample]:
    """Does the work of encode_rows() before a run, which takes the samples by take_checked_rows()."""
    samples = encode_rows(recipe, prompts, tokenizer)
    by_uid = {prompt.uid: sample for prompt, sample in zip(prompts, samples, strict=True)}
    _checked[:] = [(weakref.ref(recipe, lambda _: _checked.clear()), by_uid)]
    return samples


def take_checked_rows(recipe: Recipe) -> Mapping[str, Sample]:
    """Returns and forgets the samples of a recipe that was checked last, by uid; none for another recipe."""
    found = [by_uid for checked, by_uid in _checked if checked() is recipe]
    _checked.clear()
    return found[0] if found else {}


def encode_row(encoder: RowEncoder, prompt: Prompt, checked: Mapping[str, Sample]) -> Sample:
    """Returns the sample of a row; the one of `checked` unless the row has changed since."""
    known = checked.get(prompt.uid)
    if known is None or _list_content(known.prompt) != _list_content(prompt):
        return encoder.encode(prompt)
    # The prompts of the check are freed. Prompts of a reward model have other tokens.
    return replace(known, prompt=replace(prompt, token_ids=known.prompt.token_ids))


def _list_content(prompt: Prompt) -> tuple[object, ...]:
    return prompt.text, prompt.messages, prompt.tools, prompt.answer, prompt.metadata


def encode_rows(
    recipe: Recipe, prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase | None" = None
) -> list[Sample]:
    """Returns the samples of rows, in their order. Raises UserError for the first row that cannot be trained on."""
    encoder = create_encoder(recipe, tokenizer)
    return [encoder.encode(prompt) for prompt in prompts]


def create_encoder(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None" = None) -> RowEncoder:
    """Builds the encoder of a recipe's rows."""
    algorithm = algorithm_of(recipe)
    if algorithm.rows is None:
        raise ValueError(f"algorithm {recipe.algorithm.name!r} trains on samples, not on rows")
    tokenizer = tokenizer or load_tokenizer(recipe.model)
    written, scores = recipe.task.demonstrations, None
    if isinstance(algorithm, OfflineAlgorithm) and algorithm.trains_scores:
        tags = special_tags(tokenizer)
        style_of, chat_template = styles_by_source(recipe), recipe.task.format.chat_template

        def encode(prompt: Prompt, completion: str) -> list[int]:
            system = style_of(prompt).system
            return encode_scored(tokenizer, tags, prompt, completion, chat_template=chat_template, system=system)

        scores = encode
    return RowEncoder(
        kind=algorithm.rows,
        tokenizer=tokenizer,
        renderer=renderer_of(recipe, tokenizer),
        demonstrator=load_demonstrator(written) if written else None,
        scores=scores,
    )


def check_row_lengths(rows: Sequence[Sample], context: int | None) -> int:
    """Returns the tokens of the longest row. Raises UserError if a branch of a row exceeds the context of the model."""
    for row in rows:
        longest = longest_branch([row])
        if context is not None and longest > context:
            raise UserError(
                f"row {row.uid} has {longest} tokens with its completion, and the model's context is {context}. Drop "
                "long rows from the data, or take a model with a longer context."
            )
    return max(row.num_total_tokens for row in rows)


def longest_branch(rows: Sequence[Sample]) -> int:
    """Returns the tokens of the longest prompt with one completion."""
    return max(row.num_prompt_tokens + max(len(segment.token_ids) for segment in row.segments) for row in rows)
