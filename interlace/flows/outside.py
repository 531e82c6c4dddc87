"""Requests and episodes outside the flow, for an evaluation."""

from collections.abc import Sequence

from interlace.core.types import Prompt, Request, Response, Sample, SamplingParams
from interlace.flows.step_metrics import StepMeter
from interlace.rollouts.generate import Player
from interlace.rollouts.pool import EnginePool


class OutsideGeneration:
    """Generates with the engines of a run, without rows of the channel."""

    def __init__(self, pool: EnginePool, player: Player, meter: StepMeter) -> None:
        self._pool, self._player, self._meter = pool, player, meter

    async def complete(self, requests: Sequence[Request]) -> list[Response]:
        """Serves requests and returns their responses, in the order of the requests."""
        self._meter.evaluating()
        return await self._pool.complete(requests, who="evaluation")

    async def play(self, asked: Sequence[tuple[Prompt, int]], params: SamplingParams) -> list[Sample]:
        """Runs episodes, one for each prompt and index; see Player."""
        self._meter.evaluating()
        return await self._player.play(asked, params)
