"""Text of answers during sampling. Text is sent once no further token can change it."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.rollouts.rendering.parsers.base import open_end

PART_OF_A_CHARACTER = "\ufffd"
"""Character that a decoder writes for an incomplete character."""


@dataclass(slots=True)
class SentText:
    """Sent text of one answer."""

    text: str = ""

    def more(self, text: str, stops: Sequence[str] = ()) -> str:
        """Returns the new part of an incomplete text. stops: texts before which the answer ends."""
        return self.rest(cut_undecided_end(text, stops))

    def rest(self, text: str) -> str:
        new = text[len(self.text) :] if text.startswith(self.text) else ""
        self.text += new
        return new


def cut_undecided_end(text: str, stops: Sequence[str]) -> str:
    """Returns the part of an incomplete text that no further token can change."""
    cuts = [place for stop in stops if (place := text.find(stop)) >= 0]
    if cuts:
        return text[: min(cuts)]
    whole = text.rstrip(PART_OF_A_CHARACTER)
    return whole[: len(whole) - open_end(whole, stops)]
