"""Tokenizers that differ from the byte tokenizer of the tiny models, trained on a few words."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

DIGITS = [
    "<answer>" + "".join(str((start * step + 3) % 10) for step in range(1, 8)) + "</answer>" for start in range(60)
]


def merging_tokenizer(texts: list[str] | None = None, *, size: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose tokens have several characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*(texts or DIGITS), "grüße naïve 日本 the quick brown fox " * 3], trainer)
    return _fast(tokenizer)


def lower_casing_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that does not restore capital letters, nor characters outside of its alphabet."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "<unk>": 2, "one": 3}, unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return _fast(words)


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", clean_up_tokenization_spaces=False
    )


def spacing_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before each text, as SentencePiece does; of kind "llama" also after each tag."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<pad>", "<end>", "<unk>"])
    tokenizer.train_from_iterator([chr(code) for code in range(33, 127)] + ["\n\u2581 yes yes"], trainer)
    return _fast(tokenizer)
