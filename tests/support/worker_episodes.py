"""Episodes for worker processes, and the functions that make them there."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from interlace.core.types import Prompt
from interlace.rollouts.base import Episode, Outcome, Session
from interlace.rollouts.envs.spec import SimulatorError
from interlace.rollouts.session import SessionLimits

HINT = [40, 41, 42]


@dataclass
class ThreeTurns:
    """Episode of three turns, the last two concurrent, with a reward for the first turn and the number of cached
    tokens.
    """

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        first = await session.generate(prompt.token_ids.tolist())
        session.reward(first, 0.25)
        async with session.waiting("a search"):
            await asyncio.sleep(0.01)
        session.tool_called("search", seconds=0.01)
        so_far = [*prompt.token_ids.tolist(), *first.token_ids.tolist(), *HINT]
        params = session.params.model_copy(update={"max_new_tokens": 5})
        later = await asyncio.gather(*(session.generate([*so_far, n], params=params, number=n) for n in (1, 2)))
        cached = float(max(turn.num_cached_tokens for turn in later))
        return Outcome(reward=float(session.seed % 7), parts={"pid": float(os.getpid()), "cached": cached})


@dataclass
class Misbehaves(ThreeTurns):
    """Episode that misbehaves in the first sample of the second prompt."""

    deed: str
    folder: str = ""
    """Folder that counts its attempts."""

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        first = await session.generate(prompt.token_ids.tolist(), number=9)
        if prompt.uid == "p1" and prompt.metadata.get("index") == 0:
            await self._misbehave(prompt)
        del first
        return await super().run(prompt, session)

    async def _misbehave(self, prompt: Prompt) -> None:
        num_before = len(list(Path(self.folder).iterdir())) if self.folder else 0
        if self.folder:
            (Path(self.folder) / str(num_before)).touch()
        if self.deed == "raise":
            raise KeyError("page")
        if self.deed == "break" or (self.deed == "break once" and not prompt.attempt):
            raise SimulatorError("the simulator gave NaN")
        if self.deed == "hang":
            await asyncio.sleep(1e6)
        if self.deed == "block":
            time.sleep(1e6)
        if self.deed == "die" or (self.deed == "die once" and not num_before):
            os.kill(os.getpid(), signal.SIGKILL)


class WithdrawsLate:
    """Episode that withdraws a turn whose answer is on the way to its process, and requests it again."""

    async def run(self, prompt: Prompt, session: Session) -> float:
        first = asyncio.ensure_future(session.generate(prompt.token_ids.tolist()))
        for _ in range(3):
            await asyncio.sleep(0)  # sends the request
        time.sleep(0.5)  # the answer arrives, and is not read yet
        first.cancel()
        await asyncio.wait({first})
        second = await session.generate(prompt.token_ids.tolist())
        return float(second.number)


class WithdrawsFinished:
    """Episode that does not use its first turn."""

    async def run(self, prompt: Prompt, session: Session) -> float:
        first = await session.generate(prompt.token_ids.tolist())
        session.reward(first, 5.0)
        session.withdraw(first)
        second = await session.generate(prompt.token_ids.tolist())
        return float(second.number)


def make_withdraws_finished() -> tuple[Episode, SessionLimits]:
    return WithdrawsFinished(), SessionLimits(timeout_s=60.0)


def make_withdraws_late() -> tuple[Episode, SessionLimits]:
    return WithdrawsLate(), SessionLimits(timeout_s=60.0)


def make_three_turns() -> tuple[Episode, SessionLimits]:
    return ThreeTurns(), SessionLimits(timeout_s=60.0)


def make_misbehaving(deed: str, folder: str, timeout_s: float) -> tuple[Episode, SessionLimits]:
    return Misbehaves(deed=deed, folder=folder), SessionLimits(timeout_s=timeout_s)
