"""Answers that a client received in another form than the model sampled them."""

from collections.abc import Sequence

from interlace.core.messages import Message, same_message


class ShownMessages:
    """Pairs of a message that a client received and the sampled message, if they differ."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Message, Message]] = []

    def add(self, shown: Message, sampled: Message) -> None:
        """Records an answer. shown: the form in which the client received it."""
        if not same_message(shown, sampled):
            self._pairs.append((shown, sampled))

    def find_sampled(self, messages: Sequence[Message]) -> list[Message]:
        """Returns a conversation with the sampled messages, if a client sends back the versions that it received.

        Messages that look the same to the client are the newest of these answers, in the order of their sampling.
        """
        found, left = list(messages), list(self._pairs)
        for place in reversed(range(len(found))):
            if found[place].role == "assistant":
                newest_first = reversed(range(len(left)))
                at = next((at for at in newest_first if same_message(found[place], left[at][0])), None)
                if at is not None:
                    _, found[place] = left.pop(at)
        return found
