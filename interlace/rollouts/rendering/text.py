"""Conversion of text to token ids and back. Tags in a user's text stay text. Sampled tags are found by their ids."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interlace.core.types import JSON
from interlace.rollouts.rendering.parsers.base import MarkedText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HOLD, END = "\ue000", "\ue001"
"""Private characters around the number of a masked tag in a user's text, while the chat template runs."""
FIRST_MARK = 0xF0000
"""First of the private characters that stand for tags in an answer."""


def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Returns an upper bound of the characters that one token stands for: a text of N has at least N / bound tokens."""
    return max(len(token.encode(errors="replace")) for token in tokenizer.get_vocab())


class TokenText:
    """A tokenizer and its tags: its special tokens and other added tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.tags: Mapping[str, int] = {
            str(token): place for place, token in sorted(tokenizer.added_tokens_decoder.items()) if len(str(token)) > 1
        }
        """Id of each tag."""
        marked = [place for place, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.special_ids = frozenset([*marked, *tokenizer.all_special_ids])
        """Ids of the special tokens, which are no text."""
        by_length = sorted([*self.tags, HOLD], key=lambda tag: -len(tag))
        self._typed = re.compile("|".join(map(re.escape, by_length)))
        self._numbers = {tag: number for number, tag in enumerate(by_length)}
        self._held = re.compile(f"{HOLD}(\\d+){END}")
        self._by_length = by_length

    def hold(self, value: JSON) -> JSON:
        """Returns a message's text, or the arguments of a call, with masked tags."""
        if isinstance(value, str):
            return self._typed.sub(lambda match: f"{HOLD}{self._numbers[match[0]]}{END}", value)
        if isinstance(value, Mapping):
            return {str(self.hold(key)): self.hold(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.hold(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Tokenizes a template's text. The template's tags become their ids; masked tags become text."""
        if HOLD not in text:
            return self._encode(text)
        found: list[int] = []
        # Every second part is the number of a masked tag.
        for place, part in enumerate(self._held.split(text)):
            found += self._spelled(self._by_length[int(part)]) if place % 2 else self._encode(part)
        return found

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _spelled(self, tag: str) -> list[int]:
        """Tokenizes a tag as letters, in two parts that are not tags."""
        return [*self._encode(tag[:1]), *self._encode(tag[1:])] if tag in self.tags else self._encode(tag)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def marked(self, token_ids: Sequence[int], tags: Sequence[str]) -> MarkedText:
        """Returns an answer's text, in which each of `tags` that is a token is replaced by a private character."""
        marks = {tag: chr(FIRST_MARK + place) for place, tag in enumerate(tags) if tag in self.tags}
        by_id = {self.tags[tag]: mark for tag, mark in marks.items()}
        parts: list[str] = []
        run: list[int] = []
        for token in token_ids:
            if token not in by_id:
                run.append(token)
                continue
            parts += [self.decode(run) if run else "", by_id[token]]
            run = []
        return MarkedText(text="".join([*parts, self.decode(run) if run else ""]), marks=marks)
