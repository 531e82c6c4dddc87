"""Conversion of text to token ids and back. Special tokens in a user's text stay text.

Sampled tags are found by their ids.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interlace.models.token_text import TypedTags, list_special
from interlace.rollouts.rendering.parsers.base import MarkedText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHITE = " \t\r\n\u2581"
"""White space, with the character of SentencePiece for a space."""
FIRST_MARK = 0xF0000
"""First of the private characters that stand for tags in an answer."""


def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Returns an upper bound of the characters that one token stands for: a text of N has at least N / bound tokens."""
    return max(len(token.encode(errors="replace")) for token in tokenizer.get_vocab())


class TokenText(TypedTags):
    """A tokenizer and its tags: its special tokens and other added tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        added = [(str(token), place) for place, token in sorted(tokenizer.added_tokens_decoder.items())]
        # Some tokenizers have added tokens for several line ends or spaces, which are no tags.
        self.tags: Mapping[str, int] = {tag: place for tag, place in added if len(tag) > 1 and tag.strip(WHITE)}
        """Id of each tag."""
        marked = [place for place, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.special_ids = frozenset([*marked, *tokenizer.all_special_ids])
        """Ids of the special tokens, which are no text."""
        super().__init__(tokenizer, list_special(tokenizer))

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
