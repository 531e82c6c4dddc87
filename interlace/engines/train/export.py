"""Weights by name, and a model saved as a standard Hugging Face folder."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_FOLDER = "adapter"
"""Folder of a saved model that contains the adapter alone, if an adapter was trained."""


def list_named_weights(model: nn.Module) -> Mapping[str, Tensor]:
    """Returns parameters and persistent buffers, detached, by `state_dict` name; a tied tensor under its first name."""
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return kept


def list_exact_names(model: PreTrainedModel, names: Iterable[str], served: torch.dtype) -> frozenset[str]:
    """Returns the names of tensors that transformers loads in float32 into a model of type `served`.

    Experts are chosen by such tensors, for example: other experts would be chosen after rounding.
    """
    from transformers.core_model_loading import build_glob_alternation

    patterns = [*model._get_dtype_plan(served)]
    if not patterns:
        return frozenset()
    alternation = build_glob_alternation(patterns)[0]
    return frozenset(name for name in names if alternation.search(name))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelFiles:
    """A folder that `from_pretrained` loads, tokenizer included."""

    empty: PreTrainedModel
    """The model without its weights, on the meta device."""
    weights: Mapping[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None

    def write(self, folder: Path) -> None:
        self.empty.save_pretrained(folder, state_dict={**self.weights})
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def save_model(model: PreTrainedModel, path: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Writes a folder that `from_pretrained` loads, tokenizer included."""
    model_files(model, list_named_weights(model), tokenizer).write(path)


def model_files(
    model: PreTrainedModel, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase | None
) -> ModelFiles:
    """Returns the files of a model with these weights.

    transformers refuses to save a model that was loaded from GGUF, because of a marker in its configuration. The files
    are written through an empty model of the same configuration without the marker.
    """
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        # The folder's config states this model's dtype, in which the folder will be loaded.
        empty = type(model)(config).to(model.dtype)  # type: ignore[arg-type]  # transformers' own stub
    if model.can_generate():
        empty.generation_config = model.generation_config
    return ModelFiles(empty=empty, weights=weights, tokenizer=tokenizer)
