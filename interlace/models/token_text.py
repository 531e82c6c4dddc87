"""Bytes of tokens, and alignment of two tokenizations of a text: groups of tokens that spell the same characters.

Tags that a user types are text in a message that spells a special token of the tokenizer, such as `<|im_end|>`. Other
added tokens, such as `<think>`, stay tokens, as in transformers' apply_chat_template().
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from interlace.core.types import JSON

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_INCOMPLETE = "\ufffd"
"""Character that a decoder writes for the bytes of an incomplete character."""
_SPACE = "\u2581"
"""Character of SentencePiece for a space."""
_FIRST_SPACES = (_SPACE, "\u0120")
"""Characters of SentencePiece and of byte-level tokenizers for a space before a text."""
_BEFORE = "\n"
"""Text with which tokens seldom continue: a text is tokenized after it."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Token of SentencePiece for one byte."""


class SpelledTokens(NamedTuple):
    """Tokens and their text."""

    text: str
    ends: Sequence[int | None]
    """[L] number of characters up to the end of each token; None within a character, and after an empty token."""


class Chunk(NamedTuple):
    """Tokens of two tokenizers with the same text: first[first_start:first_end] and second[second_start:second_end]."""

    first_start: int
    first_end: int
    second_start: int
    second_end: int


def spell_tokens(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], after: Sequence[int] = ()) -> SpelledTokens:
    """Returns the text of tokens and the place of each token in it.

    Decodes a few tokens at a time, together with the tokens before them, because a decoder treats the beginning of a
    text differently: decoders of SentencePiece remove a space. after: the tokens before `ids`.
    """
    text, ends = "", []
    ids = [*after, *ids]
    known_start, known_end = 0, len(after)  # tokens that are decoded before the next ones
    for place in range(known_end + 1, len(ids) + 1):
        before = _decode_ids(tokenizer, ids[known_start:known_end])
        found = _decode_ids(tokenizer, ids[known_start:place])
        is_whole = len(found) > len(before) and not found.endswith(_INCOMPLETE)
        if is_whole or (place == len(ids) and len(found) > len(before)):
            text += found[len(before) :]
            known_start, known_end = known_end, place
        ends.append(len(text) if is_whole or place == len(ids) else None)
    return SpelledTokens(text, ends)


def align_tokens(first: SpelledTokens, second: SpelledTokens) -> Iterator[Chunk]:
    """Yields the smallest groups of tokens of equal text, in order, up to the first difference of the texts."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first.text, second.text, strict=False)))
    places = {end: place + 1 for place, end in enumerate(second.ends) if end is not None and end <= common}
    first_start = second_start = 0
    for place, end in enumerate(first.ends, start=1):
        if end is None or end not in places or places[end] <= second_start:
            continue
        yield Chunk(first_start, place, second_start, places[end])
        first_start, second_start = place, places[end]


def lossy_text(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> tuple[str, str] | None:
    """Returns the first text that a tokenizer does not restore, and the text after decoding; None without one."""
    for text in texts:
        found = _decode_ids(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])
        if found != text:
            return text, found
    return None


def _decode_ids(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> str:
    found = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return found if isinstance(found, str) else "".join(found)


def drop_added_end(tokenizer: "PreTrainedTokenizerBase", text: str, token_ids: list[int]) -> list[int]:
    """Returns the tokens of a text without the end token that some tokenizers add: a model continues the text.

    token_ids: of the text, with the tokenizer's special tokens. An end token that the text itself spells stays.
    """
    if token_ids[-1:] != [tokenizer.eos_token_id]:
        return token_ids
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids if token_ids[-len(bare) :] == bare else token_ids[:-1]


def with_end(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> list[int]:
    """Returns the tokens of an example with the end token at the end, once: rows may have it in their text."""
    end = int(tokenizer.eos_token_id)
    return token_ids if token_ids[-1:] == [end] else [*token_ids, end]


@lru_cache(maxsize=8)  # it is called for each text
def adds_space(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Returns whether a tokenizer puts a space before each text, as most of SentencePiece do."""
    first = tokenizer("a", add_special_tokens=False)["input_ids"][:1]
    return any(str(piece).startswith(_FIRST_SPACES) for piece in tokenizer.convert_ids_to_tokens(first))


def encode_continuation(tokenizer: "PreTrainedTokenizerBase", text: str, after: Sequence[int] = ()) -> list[int]:
    """Returns the tokens of a text that follows other text, without the space that some tokenizers put before it.

    after: the tokens before the text. If they end with a tag, the text is tokenized after it: some tokenizers put a
    space after tags too.
    """
    if not text or not adds_space(tokenizer):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    tag = tokenizer.added_tokens_decoder.get(int(after[-1])) if len(after) else None
    begin = _BEFORE if tag is None else str(tag)
    before, whole, alone = tokenizer([begin, begin + text, text], add_special_tokens=False)["input_ids"]
    return list(whole[len(before) :] if whole[: len(before)] == before else alone)


class TokenBytes:
    """Bytes of the tokens of a tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._has_byte_letters = decoder is not None and b"ByteLevel" in decoder.__getstate__()

    def spell(self, token_id: int) -> bytes:
        """Returns the bytes of a token. They may be a part of a character, which a decoder would replace by U+FFFD."""
        if added := self._added.get(token_id):
            return self._spell_added(token_id, str(added), is_special=added.special)
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):  # the model has more outputs than the tokenizer has tokens
            return b""
        if self._has_byte_letters and all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(match[1])
        if _SPACE in piece:  # decoding drops the space at the beginning of a text
            return piece.replace(_SPACE, " ").encode()
        return _decode_ids(self._tokenizer, [token_id]).encode(errors="replace")

    def _spell_added(self, token_id: int, piece: str, *, is_special: bool) -> bytes:
        """Spells an added token. Some are spaces in the form of SentencePiece, which only its decoders replace."""
        has_spaces = not is_special and _SPACE in piece and _SPACE not in _decode_ids(self._tokenizer, [token_id])
        return (piece.replace(_SPACE, " ") if has_spaces else piece).encode()


def _list_byte_letters() -> Mapping[str, int]:
    """Returns the byte of each letter of byte-level tokenizers (GPT-2): printable characters stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _list_byte_letters()


HOLD, END = "\ue000", "\ue001"
"""Private characters around the number of a masked tag in a user's text, while the chat template runs."""


class TypedTags:
    """Masks tags in messages, so that the text of a chat template has no other tags than the template's."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tags: Iterable[str]) -> None:
        """tags: the texts that are masked."""
        self._tokenizer = tokenizer
        self._tags = sorted({*tags, HOLD}, key=lambda tag: (-len(tag), tag))
        self._typed = re.compile("|".join(map(re.escape, self._tags)))
        self._numbers = {tag: number for number, tag in enumerate(self._tags)}
        self._held = re.compile(f"{HOLD}(\\d+){END}")

    def hold(self, value: JSON) -> JSON:
        """Returns a message's text, or the arguments of a call, with masked tags."""
        if isinstance(value, str):
            return self._typed.sub(lambda match: f"{HOLD}{self._numbers[match[0]]}{END}", value)
        if isinstance(value, Mapping):
            return {str(self.hold(key)): self.hold(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.hold(item) for item in value]
        return value

    def hold_message(self, message: Mapping[str, JSON]) -> dict[str, JSON]:
        """Returns a message in OpenAI's form with masked tags. The texts of the assistant keep their tags, but no text
        may look like a masked tag.
        """
        kept = ("content", "reasoning_content") if message["role"] == "assistant" else ()
        held = f"{HOLD}{self._numbers[HOLD]}{END}"
        found: dict[str, JSON] = {}
        for name, value in message.items():
            if name in kept and isinstance(value, str):
                found[name] = value.replace(HOLD, held)
            else:
                found[name] = value if name == "role" else self.hold(value)
        return found

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Tokenizes a template's text. The template's tags become their ids; masked tags become text.

        continues: whether other text is before it, so that the tokenizer adds no space.
        """
        found: list[int] = []
        # Every second part is the number of a masked tag.
        for place, part in enumerate(self._held.split(text)):
            is_later = continues or bool(found)
            found += self._spelled(self._tags[int(part)], is_later) if place % 2 else self._encode(part, is_later)
        return found

    def encode_after(self, before: str, text: str) -> list[int]:
        """Tokenizes a text that follows `before`, which is already tokenized.

        If the tokens of the whole text begin with the tokens of `before`, the result is the rest of them.
        """
        if not adds_space(self._tokenizer):
            return self.encode(text)
        known, whole = self.encode(before), self.encode(before + text)
        return whole[len(known) :] if whole[: len(known)] == known else self.encode(text, continues=True)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenizes several texts as encode() does; those without masked tags in one call."""
        plain = [text for text in texts if HOLD not in text]
        found = iter(self._tokenizer(plain, add_special_tokens=False)["input_ids"] if plain else ())
        return [self.encode(text) if HOLD in text else list(next(found)) for text in texts]

    def _encode(self, text: str, continues: bool = False) -> list[int]:
        if continues:
            return encode_continuation(self._tokenizer, text)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _spelled(self, tag: str, continues: bool = False) -> list[int]:
        """Tokenizes a tag as letters, in two parts that are not tags."""
        if tag == HOLD:
            return self._encode(tag, continues)
        return [*self._encode(tag[:1], continues), *self._encode(tag[1:], True)]


def special_tags(tokenizer: "PreTrainedTokenizerBase") -> TypedTags:
    """Returns the special tokens of a tokenizer as tags."""
    return TypedTags(tokenizer, list_special(tokenizer))


def list_special(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Returns the special tokens of a tokenizer, which separate the turns of a conversation."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return [tag for tag in (*special, *tokenizer.all_special_tokens) if len(tag) > 1]
