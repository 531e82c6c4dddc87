"""A reward model to load by path."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from interlace.models.tiny import build_tokenizer

CONTEXT = 64


def write_model(folder: Path, *, kind: str = "qwen2", labels: int = 1) -> str:
    """Writes a small reward model with random weights, and a tokenizer with one token per byte."""
    tokenizer = build_tokenizer(CONTEXT)
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=CONTEXT, num_labels=labels,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
