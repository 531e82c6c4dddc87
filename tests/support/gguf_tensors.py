"""Tensors of a Llama model as llama.cpp's converter writes them."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel


def list_gguf_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name in a GGUF file and the values of each tensor. A tied output matrix is not written."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None:  # llama.cpp interleaves the halves that rotary embedding pairs
            weight = weight.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(weight.shape)
        yield names.get_name(name, try_suffixes=(".weight",)), weight.contiguous()
