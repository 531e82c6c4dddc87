"""Base classes of samplers, which choose the order of prompts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

from pydantic import JsonValue

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.types import Prompt

Snapshot: TypeAlias = Callable[[Sequence[int]], JsonValue]
"""Function from the numbers of unfinished draws to a sampler's state at the time of the snapshot."""


class PromptDraw(NamedTuple):
    """One draw of a prompt."""

    position: int
    """Place of the prompt among the sampler's prompts."""
    attempt: int
    """How often the prompt was drawn before; part of the key of the sampling noise."""


class NoSettings(Config):
    """Settings of a sampler that has none."""


class PromptSampler(ABC):
    """Sampler: gives each draw number, 0, 1, ..., a prompt.

    Equal prompts, settings, seed and state give equal draws.
    """

    Settings: ClassVar[type[Config]] = NoSettings

    def __init__(self, settings: Config, prompts: Sequence[Prompt], seed: int) -> None:
        """prompts: in a fixed order, one or more. Raises UserError for prompts that the sampler cannot order."""
        self.settings, self.prompts, self.seed = settings, prompts, seed

    @abstractmethod
    def draw(self, number: int) -> PromptDraw:
        """Returns a draw. Numbers come in ascending order; a number that was drawn before gives the same draw."""

    @abstractmethod
    def number_of(self, draw: PromptDraw) -> int | None:
        """Returns the number of a draw; None if the sampler did not make it."""

    def observe(self, rates: Mapping[int, float]) -> None:  # noqa: B027 - most do not learn
        """Receives measured solve rates, 0 to 1, of trained groups, by the position of their prompt."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Returns the weight of each source by its name; {} without a mixture."""
        return {}

    def set_weights(self, weights: Mapping[str, float], number: int) -> None:
        """Changes the weights of a mixture's sources from a draw on.

        number: of that draw, after all draws so far. Raises UserError for weights that cannot be drawn by.
        """
        del number
        raise UserError(f"weights {dict(weights)} are for a mixture, and the prompts of this run are of one source.")

    def snapshot(self) -> Snapshot:
        """Returns a function that gives the present state; None for a sampler whose draws follow from their number."""
        return lambda numbers: None  # noqa: ARG005 - there is no state

    def restore(self, state: JsonValue) -> None:  # noqa: B027 - most have no state
        """Continues from a state."""


class EpochSampler(PromptSampler):
    """Sampler in epochs: each epoch serves every prompt once. A subclass gives the order."""

    def __init__(self, settings: Config, prompts: Sequence[Prompt], seed: int) -> None:
        super().__init__(settings, prompts, seed)
        self._orders: dict[int, list[int]] = {}

    @abstractmethod
    def order(self, epoch: int) -> list[int]:
        """Returns the positions of all prompts in the order of an epoch."""

    def draw(self, number: int) -> PromptDraw:
        epoch, place = divmod(number, len(self.prompts))
        return PromptDraw(self._shuffle_epoch(epoch)[place], epoch)

    def number_of(self, draw: PromptDraw) -> int | None:
        return draw.attempt * len(self.prompts) + self._shuffle_epoch(draw.attempt).index(draw.position)

    def _shuffle_epoch(self, epoch: int) -> list[int]:
        order = self._orders.get(epoch)
        if order is None:
            order = self.order(epoch)
            # Generation may run past the end of an epoch, so prompts of two epochs may be in use.
            self._orders = {kept: other for kept, other in self._orders.items() if kept >= epoch - 1} | {epoch: order}
        return order


def mean_rates(observed: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Returns the mean rate of each position."""
    found: dict[int, list[float]] = {}
    for position, rate in observed:
        found.setdefault(position, []).append(rate)
    return {position: sum(rates) / len(rates) for position, rates in sorted(found.items())}
