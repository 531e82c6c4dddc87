"""Episode in which the model answers, reads whether the answer was right, and corrects a wrong answer once."""

import string
from typing import Self

from pydantic import Field, model_validator

from interlace.core.errors import ContextFullError
from interlace.core.messages import Message
from interlace.core.types import FinishReason, Prompt
from interlace.rollouts.base import Outcome, Session
from interlace.rollouts.config import EpisodeConfig, EpisodeKind


class SecondGuessConfig(EpisodeConfig):
    """Settings of episodes with a second guess. An answer is right if it equals the row's `answer`."""

    feedback: str = "Wrong. It is {answer}."
    """User message after a wrong answer; {answer} is replaced by the right answer, {guess} by the model's."""
    first_reward: float = 1.0
    """Reward of a right first turn."""
    second_reward: float = 1.0
    """Reward of a right second turn."""
    max_turns: int = Field(default=2, ge=2)

    @model_validator(mode="after")
    def _check_feedback_names(self) -> Self:
        names = {name for _, name, _, _ in string.Formatter().parse(self.feedback) if name is not None}
        if unknown := sorted(names - {"answer", "guess"}):
            raise ValueError(f"feedback names {unknown[0]!r}; it may name {{answer}} and {{guess}}")
        return self


class SecondGuessKind(EpisodeKind):
    """Kind of episodes with a second guess."""

    Config = SecondGuessConfig
    config: SecondGuessConfig
    needs_chat = True

    def create(self) -> "SecondGuess":
        return SecondGuess(self.config)


class SecondGuess:
    """Two turns with separate rewards; the sample's reward is their sum."""

    def __init__(self, config: SecondGuessConfig) -> None:
        self._config = config

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        first = await session.generate(prompt.messages)
        is_right = self._is_right(first.message, prompt)
        session.reward(first, self._config.first_reward * is_right)
        if is_right:
            return Outcome(text=first.message.content, parts={"first": 1.0, "second": 0.0})
        feedback = self._config.feedback.format(answer=prompt.answer, guess=first.message.content)
        said = [*prompt.messages, first.message, Message(role="user", content=feedback)]
        try:
            second = await session.generate(said)
        except ContextFullError:
            parts = {"first": 0.0, "second": 0.0}
            return Outcome(text=first.message.content, parts=parts, finish_reason=FinishReason.LENGTH)
        is_right = self._is_right(second.message, prompt)
        session.reward(second, self._config.second_reward * is_right)
        return Outcome(text=second.message.content, parts={"first": 0.0, "second": float(is_right)})

    @staticmethod
    def _is_right(message: Message, prompt: Prompt) -> bool:
        return message.content.strip() == prompt.answer.strip()
