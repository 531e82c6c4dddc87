"""A tiny mixture-of-experts model in a folder, with a byte tokenizer."""

from pathlib import Path

from interlace.models.tiny import build_tokenizer
from tests.unit.engines.train.models import tiny_model


def save_mixture(folder: Path, kind: str = "qwen3_moe", **settings: object) -> str:
    """Writes a model of random weights with four experts per layer. Returns its path."""
    tokenizer = build_tokenizer(128)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    tiny_model(kind, **{**sizes, **ends, **settings}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
