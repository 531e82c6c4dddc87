"""Episodes of several turns with slow and faulty tools, each determined by its sample."""

import asyncio
import random
from dataclasses import dataclass

from interlace.core.errors import EpisodeLostError
from interlace.core.types import RETRY, Prompt
from interlace.rollouts.base import Outcome, Session


class ToolBroke(Exception):
    """A tool raised."""


@dataclass
class RandomEpisodes:
    """Episode of one to three turns with tools between them. The session is notified of some tools."""

    seed: int
    fail_share: float
    tool_s: float
    """Mean seconds of a tool."""
    num_running: int = 0
    """Tools that currently run."""
    num_begun: int = 0
    num_failed: int = 0
    lose_share: float = 0.0
    """Share of tools that lose the episode's process, during its first or second attempt."""
    num_lost: int = 0

    async def run(self, prompt: Prompt, session: Session) -> Outcome | float | None:
        rng = random.Random(f"{self.seed} {session.seed}")  # differs between attempts
        self.num_begun += 1
        context = prompt.token_ids.tolist()
        for number in range(rng.randint(1, 3)):
            if number and rng.random() < 0.3:
                await self._side_by_side(context, session, rng)
            turn = await session.generate(context)
            context = [*context, *turn.token_ids.tolist(), *range(rng.randint(0, 4))]
            await self._tool(session, rng)
            if self.lose_share and prompt.attempt < 2 * RETRY and rng.random() < self.lose_share:
                self.num_lost += 1
                raise EpisodeLostError("its process is gone")
        return rng.choice([None, None, 0.5, Outcome(reward=1.0, parts={"tools": 1.0})])

    async def _side_by_side(self, context: list[int], session: Session, rng: random.Random) -> None:
        """Runs two branches, one of which may be cancelled."""
        branches = [asyncio.ensure_future(session.generate([*context, 7, place])) for place in range(2)]
        if rng.random() < 0.3:
            await asyncio.wait({branches[0]}, timeout=rng.expovariate(1 / self.tool_s))
            branches[0].cancel()
        await asyncio.gather(*branches, return_exceptions=True)

    async def _tool(self, session: Session, rng: random.Random) -> None:
        seconds = rng.choice([0.0, rng.expovariate(1 / self.tool_s)])
        self.num_running += 1
        try:
            if rng.random() < 0.5:
                async with session.waiting("a tool"):
                    await asyncio.sleep(seconds)
            else:
                await asyncio.sleep(seconds)
        finally:
            self.num_running -= 1
        if rng.random() < self.fail_share:
            self.num_failed += 1
            raise ToolBroke("out of order")
