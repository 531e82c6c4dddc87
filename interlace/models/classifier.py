"""Sequence classifiers with one output (the usual form of published reward models), loaded by the Auto classes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.models.config import ModelConfig
from interlace.models.loading import Origin, check_vocabulary, find_origin, load_tokenizer, load_whole, read_config
from interlace.models.size import context_length
from interlace.models.tiny import TINY
from interlace.models.transformers_lock import TRANSFORMERS_LOCK

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

HEAD = "ForSequenceClassification"
"""Suffix of the architecture's name."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedClassifier:
    """A classifier on the CPU, in evaluation mode."""

    model: "PreTrainedModel"
    """Model whose `logits` are [texts, 1]; its pad token is the tokenizer's."""
    tokenizer: "PreTrainedTokenizerBase"
    context: int | None
    """Longest input, in tokens, by context_length. If None, no limit is known."""


def holds_classifier(folder: Path) -> bool:
    """Returns whether a folder contains a sequence classifier, as a checkpoint of a trained reward model does.

    A folder without a configuration contains none.
    """
    config = folder / "config.json"
    found = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return any(str(name).endswith(HEAD) for name in found.get("architectures") or ())


def check_classifier(config: ModelConfig) -> None:
    """Raises the UserErrors of load_classifier without reading weights."""
    found = _classifier_config(find_origin(config), config)
    check_vocabulary(config, found, load_tokenizer(config))


def empty_classifier(config: ModelConfig) -> "PreTrainedModel":
    """Builds the model without weights, on the meta device. Raises the errors of check_classifier."""
    import torch
    from transformers import AutoModelForSequenceClassification

    found = _classifier_config(find_origin(config), config)
    with TRANSFORMERS_LOCK, torch.device("meta"):
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
            found, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
        )
    return model


def load_classifier(config: ModelConfig) -> LoadedClassifier:
    """Loads model and tokenizer. Raises UserError if the model is missing, is not a sequence classifier with one label,
    or lacks weights.
    """
    from transformers import AutoModelForSequenceClassification

    origin = find_origin(config)
    found, tokenizer = _classifier_config(origin, config), load_tokenizer(config)
    check_vocabulary(config, found, tokenizer)
    model = load_whole(AutoModelForSequenceClassification, origin, config, what="reward model", whole="with its head")
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    return LoadedClassifier(model=model.eval(), tokenizer=tokenizer, context=context_length(found))


def _classifier_config(origin: Origin, config: ModelConfig) -> "PretrainedConfig":
    if config.path.startswith(TINY):
        raise UserError(f"reward model {config.path!r}: tiny models have no classification head. Give a trained one.")
    found = read_config(origin, config, what="reward model")
    given = found.architectures or []
    if not any(name.endswith(HEAD) for name in given) and "AutoModel" + HEAD not in getattr(found, "auto_map", {}):
        what = ", ".join(given) or found.model_type
        raise UserError(
            f"reward model {config.path!r} is no sequence classifier: its configuration says {what}. Give one that "
            f"AutoModel{HEAD} loads, with one label."
        )
    if found.num_labels != 1:
        raise UserError(
            f"reward model {config.path!r} has num_labels={found.num_labels}: a reward is one number. Give a model "
            "with one label, or wrap this one in a reward function of your own (package.module:function)."
        )
    return found
