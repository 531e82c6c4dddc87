"""The model answers, reads whether that was right, and where it was not answers once more."""

import string
from typing import Self

from pydantic import Field, model_validator

from interlace.core.messages import Message
from interlace.core.types import Prompt
from interlace.rollouts.base import Outcome, Session
from interlace.rollouts.config import EpisodeConfig, EpisodeKind


class SecondGuessConfig(EpisodeConfig):
    """Settings of episodes with a second guess. The row's `answer` is what is right, to the letter."""

    feedback: str = "Wrong. It is {answer}."
    """Message of the user after a wrong answer; {answer} stands for the right one, {guess} for what was said."""
    first_reward: float = 1.0
    """Reward of a first turn that is right."""
    second_reward: float = 1.0
    """Reward of a second turn that is right."""
    max_turns: int = Field(default=2, ge=2)

    @model_validator(mode="after")
    def _names_what_is_there(self) -> Self:
        names = {name for _, name, _, _ in string.Formatter().parse(self.feedback) if name is not None}
        if unknown := sorted(names - {"answer", "guess"}):
            raise ValueError(f"feedback names {unknown[0]!r}; it may name {{answer}} and {{guess}}")
        return self


class SecondGuessKind(EpisodeKind):
    """Kind of the episodes with a second guess."""

    Config = SecondGuessConfig
    config: SecondGuessConfig
    needs_chat = True

    def create(self) -> "SecondGuess":
        return SecondGuess(self.config)


class SecondGuess:
    """Two turns, each with a reward of its own; the sample's is their sum."""

    def __init__(self, config: SecondGuessConfig) -> None:
        self._config = config

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """Asks once, and once more behind the feedback."""
        first = await session.generate(prompt.messages)
        is_right = self._is_right(first.message, prompt)
        session.reward(first, self._config.first_reward * is_right)
        if is_right:
            return Outcome(text=first.message.content, parts={"first": 1.0, "second": 0.0})
        feedback = self._config.feedback.format(answer=prompt.answer, guess=first.message.content)
        said = [*prompt.messages, first.message, Message(role="user", content=feedback)]
        second = await session.generate(said)
        is_right = self._is_right(second.message, prompt)
        session.reward(second, self._config.second_reward * is_right)
        return Outcome(text=second.message.content, parts={"first": 0.0, "second": float(is_right)})

    @staticmethod
    def _is_right(message: Message, prompt: Prompt) -> bool:
        return message.content.strip() == prompt.answer.strip()
