"""Tokenizer of `tiny:vla`: action tokens first, then words of instructions; unknown words are split into letters."""

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlace.models.tiny import EOS, PAD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN, SENSED = "<unk>", "<sensed>"
WORDS = """
a and at button door drawer from goal handle in it lever open close pick place press puck pull push put reach slide
soccer ball sweep the to top up down above window wall peg insert hammer nail coffee stick shelf basket balance keep
pole upright swing
"""


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Tokens that only the policy uses."""

    placeholder: int
    queries: tuple[int, ...]


def build_word_tokenizer(bins: int, num_queries: int, max_length: int) -> "tuple[PreTrainedTokenizerBase, SpecialIds]":
    """Builds the tokenizer. bins: action tokens. num_queries: query tokens of a chunk decoded in parallel."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, EOS, UNKNOWN, SENSED, *[f"<query{number}>" for number in range(num_queries)]]
    letters = string.ascii_lowercase + string.digits + string.punctuation
    actions = [f"<action{number}>" for number in range(bins)]
    pieces = [*actions, *special, *WORDS.split(), *letters, *[f"##{letter}" for letter in letters]]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in actions])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    queries = tuple(vocabulary[f"<query{number}>"] for number in range(num_queries))
    return made, SpecialIds(vocabulary[SENSED], queries)
