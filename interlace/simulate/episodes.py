"""An episode that only costs time: turns, what each is given, and the seconds of its tools, as they were measured."""

import asyncio
from collections.abc import Sequence

from interlace.core.profile import Turns
from interlace.core.types import Prompt
from interlace.episodes.base import Session
from interlace.simulate.lengths import uniforms


class SimulatedEpisode:
    """Episode drawn from a turn model, keyed by its sample: the same under every schedule."""

    def __init__(self, turns: Turns, *, brings_reward: bool) -> None:
        """brings_reward: False where a scorer gives the reward."""
        self._turns, self._brings_reward = turns, brings_reward

    async def run(self, prompt: Prompt, session: Session) -> float | None:
        """Makes the turns, with a wait for each tool between."""
        model, seed = self._turns, session.seed
        count, is_right = uniforms("turns", seed)
        context = prompt.token_ids.tolist()
        drawn: list[int] = []
        for number in range(max(1, round(at(model.turns, count)))):
            if number:
                length, seconds = uniforms("tool", seed, number)
                async with session.waiting("a tool"):
                    await asyncio.sleep(at(model.tool_s, seconds))
                context = [*context, *drawn, *[0] * round(at(model.given_tokens, length))]
            drawn = (await session.generate(context)).token_ids.tolist()
        return float(is_right < model.reward) if self._brings_reward else None


def at(quantiles: Sequence[float], probability: float) -> float:
    """Returns the value at a probability, linear between the quantiles, which are evenly spaced."""
    place = probability * (len(quantiles) - 1)
    low = min(int(place), len(quantiles) - 1)
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (quantiles[high] - quantiles[low]) * (place - low)
