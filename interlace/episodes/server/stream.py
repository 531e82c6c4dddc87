"""Text of answers that are still drawn: it goes out as soon as nothing to come can change it."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.data.rendering.parsers.base import open_end

PART_OF_A_CHARACTER = "\ufffd"
"""Sign of a decoder for bytes that are no whole character, yet."""


@dataclass(slots=True)
class SentText:
    """Text of one answer that went out."""

    text: str = ""

    def more(self, text: str, stops: Sequence[str] = ()) -> str:
        """Returns what a text so far adds. stops: the client's, before which the answer ends."""
        return self.rest(certain(text, stops))

    def rest(self, text: str) -> str:
        """Returns what the whole text adds."""
        new = text[len(self.text) :] if text.startswith(self.text) else ""
        self.text += new
        return new


def certain(text: str, stops: Sequence[str]) -> str:
    """Returns the part of a text so far that stands in the answer whatever comes behind it."""
    cuts = [place for stop in stops if (place := text.find(stop)) >= 0]
    if cuts:
        return text[: min(cuts)]
    whole = text.rstrip(PART_OF_A_CHARACTER)
    return whole[: len(whole) - open_end(whole, stops)]
