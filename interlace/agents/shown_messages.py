"""Answers that a client received in another form than the model sampled them."""

from interlace.core.messages import Message, same_message


class ShownMessages:
    """Pairs of a message that a client received and the sampled message, if they differ."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Message, Message]] = []

    def add(self, shown: Message, sampled: Message) -> None:
        """Records an answer. shown: the form in which the client received it."""
        if not same_message(shown, sampled):
            self._pairs.append((shown, sampled))

    def find_sampled(self, message: Message) -> Message:
        """Returns the sampled message, if a client sends back the version of it that it received."""
        if message.role != "assistant":
            return message
        return next((sampled for shown, sampled in reversed(self._pairs) if same_message(message, shown)), message)
