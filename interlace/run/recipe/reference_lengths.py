"""Lengths of the sequences that the reference reads, compared with the context of each of its models."""

from collections.abc import Sequence

from interlace.core.errors import UserError
from interlace.engines.rollout.kinds import create_kind
from interlace.models.action_tokens import action_tokens
from interlace.models.config import ModelConfig
from interlace.models.loading import empty_model
from interlace.models.size import context_length
from interlace.run.recipe.config import Recipe


def shortest_context(recipe: Recipe) -> int | None:
    """Returns the tokens that the policy and all models of the reference can read; None if no model has a limit."""
    found = [_find_context(recipe.model), *(context for _, context in _list_contexts(recipe))]
    return min((context for context in found if context is not None), default=None)


def longest_read_sequence(recipe: Recipe, prompt_lengths: Sequence[int], added_lengths: Sequence[int]) -> int:
    """Returns the tokens of the longest generated sequence that the reference reads.

    prompt_lengths: tokens of each prompt. added_lengths: tokens that `reference.context` adds to each prompt.
    """
    if recipe.episode.is_single_turn:
        pairs = zip(prompt_lengths, added_lengths, strict=True)
        return max(prompt + added for prompt, added in pairs) + recipe.sampling.max_new_tokens
    return create_kind(recipe.rollout).longest_sequence(_find_context(recipe.model)) + max(added_lengths)


def check_reference_lengths(recipe: Recipe, longest: int) -> None:
    """Raises UserError if the reference reads sequences beyond its context, whose log-probs would be meaningless.

    longest: tokens of the longest sequence that it reads. The initial policy reads what generation has read, a service
    refuses long sequences, and a teacher that reads text omits the end of a long response.
    """
    reference = recipe.reference
    if reference.is_initial_policy or reference.service is not None or reference.align == "text":
        return
    for model, context in _list_contexts(recipe):
        if context is not None and longest > context:
            added = "with reference.context, " if recipe.reference.context else ""
            limit = "sampling.max_new_tokens" if recipe.episode.is_single_turn else "rollout.max_tokens"
            raise UserError(
                f"the reference reads sequences of up to {longest} tokens ({added}a prompt and its answer), and the "
                f"context of its model {model.path!r} is {context}. Lower {limit}, drop long rows, or take a reference "
                "with a longer context."
            )


def _list_contexts(recipe: Recipe) -> list[tuple[ModelConfig, int | None]]:
    """Lists the models of the reference that read tokens alone, with the tokens that each can read."""
    models = [recipe.reference.model or recipe.model, *recipe.reference.ensemble]
    configs = [(model, empty_model(model).config) for model in models]
    return [(model, context_length(config)) for model, config in configs if action_tokens(config) is None]


def _find_context(model: ModelConfig) -> int | None:
    return context_length(empty_model(model).config)
