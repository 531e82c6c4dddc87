"""The episode with one response to the prompt."""

from typing import final

from interlace.core.types import Prompt
from interlace.rollouts.base import Session
from interlace.rollouts.config import EpisodeKind


@final
class SingleTurn:
    """Episode of one request. The generation stage submits the request without a coroutine; the samples are equal."""

    async def run(self, prompt: Prompt, session: Session) -> None:
        await session.generate(prompt.token_ids.tolist())


class SingleTurnKind(EpisodeKind):
    """Kind of the episode with one response."""

    brings_reward = False

    def create(self) -> SingleTurn:
        return SingleTurn()
