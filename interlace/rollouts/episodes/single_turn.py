"""One prompt, one response."""

from typing import final

from interlace.core.types import Prompt
from interlace.rollouts.base import Session
from interlace.rollouts.config import EpisodeKind


@final
class SingleTurn:
    """One request a sample, so the generation stage makes it itself: no coroutine runs, the samples are the same."""

    async def run(self, prompt: Prompt, session: Session) -> None:
        """Lets the policy answer."""
        await session.generate(prompt.token_ids.tolist())


class SingleTurnKind(EpisodeKind):
    """Kind of the samples that are one response."""

    brings_reward = False

    def create(self) -> SingleTurn:
        return SingleTurn()
