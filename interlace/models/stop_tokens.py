"""Tokens that end the responses of a model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


def list_stop_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Returns the tokens that end a response: the tokenizer's, the generation config's and the chat template's."""
    return _join_stop_tokens(model.generation_config, tokenizer)


def read_stop_tokens(path: str, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Returns the tokens of list_stop_tokens() for a model that is not loaded here.

    path: folder, or id on the hub; its generation config counts if it is on this machine.
    """
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError):
        generation = None
    return _join_stop_tokens(generation, tokenizer)


def _join_stop_tokens(generation: "GenerationConfig | None", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    found = generation.eos_token_id if generation is not None else None
    listed = found if isinstance(found, list) else [] if found is None else [found]
    end = find_end_of_turn(tokenizer)
    return tuple(sorted({int(tokenizer.eos_token_id), *listed, *([] if end is None else [end])}))


def find_end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Returns the added token with which the chat template ends an answer; None if there is none."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        return None
    mark = "\ue002"
    probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    try:
        text = str(tokenizer.apply_chat_template(probe, tokenize=False))
    except (TemplateError, TypeError, ValueError, OverflowError):
        return None  # The chat renderer, if one is used, reports the template's error.
    end = text.rpartition(mark)[2]
    added = {str(token): place for place, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    fitting = [tag for tag in added if end.startswith(tag)]
    return added[max(fitting, key=len)] if fitting else None
