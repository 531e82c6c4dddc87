"""Tags that a user types: text in a message that spells a special token of the tokenizer, such as `<|im_end|>`.

Other added tokens, such as `<think>`, stay tokens, as in transformers' apply_chat_template().
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from interlace.core.types import JSON
from interlace.models.token_text import adds_space, encode_continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        """Returns a message in OpenAI's form with masked tags. The content of the assistant keeps its tags."""
        masked = ("tool_calls", *(() if message["role"] == "assistant" else ("content",)))
        return {name: self.hold(value) if name in masked else value for name, value in message.items()}

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
