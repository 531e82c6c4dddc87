"""Curriculum by measured solve rates: prompts that the policy sometimes solves are drawn most.

The weight of a prompt with the measured solve rate p is 4 p (1 - p), the variance of its verdicts relative to the
largest (learnability, arXiv 2502.12272). A prompt that was not measured has the weight 1, the largest.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import cast

from pydantic import Field, JsonValue

from interlace.core.config import Config
from interlace.core.random import keyed_random
from interlace.core.types import Prompt
from interlace.data.sampling import PromptDraw, PromptSampler, Snapshot

_KEPT = 1 << 16
"""Latest draws whose numbers are kept, more than can be in use at once."""


class SolveRateSettings(Config):
    """Settings of the sampling by solve rates."""

    floor: float = Field(default=0.05, gt=0, le=1)
    """Least weight of a prompt, so that one that is always or never solved is still drawn sometimes."""
    newest_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the newest measurement in a prompt's solve rate; earlier ones share the rest."""


class _State(Config):
    rates: dict[int, float]
    """Measured solve rate, by position."""
    attempts: dict[int, int]
    """Draws so far, by position."""
    draws: dict[int, tuple[int, int]]
    """Position and attempt of the unfinished draws, by number."""


class SolveRate(PromptSampler):
    """Draws by the weight of the solve rate that was measured last."""

    Settings = SolveRateSettings
    settings: SolveRateSettings

    def __init__(self, settings: SolveRateSettings, prompts: Sequence[Prompt], seed: int) -> None:
        super().__init__(settings, prompts, seed)
        self._rates: dict[int, float] = {}
        self._attempts: dict[int, int] = {}
        self._draws: dict[int, PromptDraw] = {}
        self._numbers: dict[PromptDraw, int] = {}
        self._cumulative: list[float] = []
        """Running sums of the weights; empty after a change."""

    def draw(self, number: int) -> PromptDraw:
        if number in self._draws:
            return self._draws[number]
        if not self._cumulative:
            self._cumulative = list(accumulate(self._compute_weight(place) for place in range(len(self.prompts))))
        random = keyed_random("solve_rate", self.seed, number)
        [position] = random.choices(range(len(self.prompts)), cum_weights=self._cumulative)
        attempt = self._attempts.get(position, 0)
        self._attempts[position] = attempt + 1
        self._keep_draw(number, PromptDraw(position, attempt))
        return self._draws[number]

    def number_of(self, draw: PromptDraw) -> int | None:
        return self._numbers.get(draw)

    def observe(self, rates: Mapping[int, float]) -> None:
        share = self.settings.newest_share
        for position, rate in rates.items():
            before = self._rates.get(position, rate)
            self._rates[position] = (1 - share) * before + share * rate
        self._cumulative = []

    def snapshot(self) -> Snapshot:
        rates, attempts, draws = dict(self._rates), dict(self._attempts), dict(self._draws)

        def state(numbers: Sequence[int]) -> JsonValue:
            unfinished = {number: (draws[number].position, draws[number].attempt) for number in numbers}
            return _State(rates=rates, attempts=attempts, draws=unfinished).model_dump(mode="json")

        return state

    def restore(self, state: JsonValue) -> None:
        found = _State.parse(cast(Mapping[str, object], state), where="the state of the sampler solve_rate")
        self._rates, self._attempts = dict(found.rates), dict(found.attempts)
        self._draws, self._numbers, self._cumulative = {}, {}, []
        for number, (position, attempt) in found.draws.items():
            self._keep_draw(number, PromptDraw(position, attempt))

    def _compute_weight(self, position: int) -> float:
        rate = self._rates.get(position, 0.5)
        return max(self.settings.floor, 4 * rate * (1 - rate))

    def _keep_draw(self, number: int, draw: PromptDraw) -> None:
        self._draws[number], self._numbers[draw] = draw, number
        if len(self._draws) > _KEPT:
            oldest = next(iter(self._draws))
            del self._numbers[self._draws.pop(oldest)]
