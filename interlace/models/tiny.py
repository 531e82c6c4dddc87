"""Small models built in code, with a byte tokenizer: real Hugging Face models that need no download."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlace.core.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TINY = "tiny:"
PAD, EOS = "<pad>", "<eos>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyShape:
    """Sizes of a tiny model, in Llama's architecture with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    max_positions: int = 1024
    initializer_range: float = 0.05
    """Larger than the usual 0.02, with which so narrow a model takes longer to start learning."""


SHAPES = {
    "micro": TinyShape(hidden=64, layers=3, heads=4, feed_forward=256),
    "mini": TinyShape(hidden=128, layers=4, heads=4, feed_forward=512),
}
"""micro: 0.2 million parameters, learns on one CPU core. mini: 1.1 million."""


def check_tiny(name: str) -> TinyShape:
    """Returns the shape of `tiny:name`. Raises UserError for an unknown name."""
    if name not in SHAPES:
        raise UserError(f"unknown tiny model {name!r}.{nearest(name, SHAPES)}")
    return SHAPES[name]


def build_tiny(name: str, seed: int) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Builds a randomly initialised model, the same for a seed, and its tokenizer. Raises UserError as check_tiny."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = check_tiny(name)
    tokenizer = build_tokenizer(shape.max_positions)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model, tokenizer


def build_tokenizer(max_length: int) -> "PreTrainedTokenizerBase":
    """Builds a tokenizer with one token a byte, and the tags of a thought and an answer as tokens of their own.

    Decoding gives back any text exactly, tags included; pad and end-of-sequence are special and can be left out.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
