"""Tokens of two tokenizers are aligned by their common text."""

import random

import pytest
from tokenizers import AddedToken, decoders

from interlace.models.tiny import build_tokenizer
from interlace.models.token_text import Chunk, SpelledTokens, TokenBytes, align_tokens, lossy_text, spell_tokens
from tests.support.tokenizers import lower_casing_tokenizer, merging_tokenizer

BYTES, MERGES = build_tokenizer(256), merging_tokenizer()
TEXTS = ["the quick brown fox", "<answer>123</answer>", "grüße, 日本 naïve \n\n x", "", " leading", "🙂🙂 ok"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pair", [(BYTES, MERGES), (MERGES, BYTES), (MERGES, MERGES)])
def test_chunks_have_the_same_text_and_cover_all_tokens(pair: tuple, text: str) -> None:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in pair]
    spelled = [spell_tokens(tokenizer, each) for tokenizer, each in zip(pair, ids, strict=True)]
    assert [each.text for each in spelled] == [text, text]
    chunks = list(align_tokens(*spelled))
    first = second = 0
    for chunk in chunks:
        assert (chunk.first_start, chunk.second_start) == (first, second)
        first, second = chunk.first_end, chunk.second_end
        texts = [
            tokenizer.decode(each[start:end])
            for tokenizer, each, start, end in zip(
                pair, ids, (chunk.first_start, chunk.second_start), (first, second), strict=True
            )
        ]
        assert texts[0] == texts[1] and texts[0]
    assert [first, second] == [len(each) for each in ids]
    if pair[0] is pair[1] and text.isascii():
        assert all(chunk.first_end - chunk.first_start == 1 for chunk in chunks)


def test_chunks_are_the_smallest_and_end_at_the_first_difference() -> None:
    first = SpelledTokens("abcdef", [1, 2, 4, 6])
    assert list(align_tokens(first, SpelledTokens("abcdef", [2, 4, 5, 6]))) == [
        Chunk(0, 2, 0, 1), Chunk(2, 3, 1, 2), Chunk(3, 4, 2, 4),
    ]  # fmt: skip
    assert list(align_tokens(first, SpelledTokens("abXdef", [2, 4, 5, 6]))) == [Chunk(0, 2, 0, 1)]
    assert list(align_tokens(SpelledTokens("", []), SpelledTokens("", []))) == []


def test_random_bytes_of_a_student_are_spelled_as_they_are_decoded() -> None:
    """A student may sample bytes that are no characters."""
    numbers = random.Random(0)
    for _ in range(50):
        ids = [numbers.randrange(2, 258) for _ in range(12)]
        spelled = spell_tokens(BYTES, ids)
        theirs = spell_tokens(MERGES, MERGES(spelled.text, add_special_tokens=False)["input_ids"])
        assert theirs.text == spelled.text and len(spelled.ends) == 12
        chunks = list(align_tokens(spelled, theirs))
        assert chunks[-1].first_end == 12


def test_a_tokenizer_that_loses_text() -> None:
    assert lossy_text(MERGES, TEXTS) is None
    assert lossy_text(lower_casing_tokenizer(), ["one", "One"]) == ("One", "one")


def test_added_tokens_of_spaces_are_spelled_as_spaces_by_decoders_of_sentencepiece() -> None:
    """Their bytes were those of the character that stands for a space."""
    added = [AddedToken("\u2581\u2581", normalized=False), AddedToken("<a\u2581b>", special=True)]
    for decoder, spaces in (
        (decoders.Replace("\u2581", " "), "  "),
        (decoders.Metaspace(), "  "),
        (decoders.ByteLevel(), "\u2581\u2581"),
    ):
        tokenizer = merging_tokenizer()
        tokenizer.backend_tokenizer.decoder = decoder
        tokenizer.add_tokens(added)
        ids = tokenizer.convert_tokens_to_ids([str(each) for each in added])
        token_bytes = TokenBytes(tokenizer)
        assert [token_bytes.spell(each).decode() for each in ids] == [spaces, "<a\u2581b>"]
