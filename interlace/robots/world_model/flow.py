"""Fitting of a world model to replayed trajectories, while the policy learns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from interlace.core.types import FloatArray, IntArray, Metrics, Sample
from interlace.models.config import WorldModelSettings
from interlace.models.inputs import IMAGE, STATE
from interlace.robots.episodes.robot import SUCCESS
from interlace.robots.replay.buffer import Replay
from interlace.runtime.group import Handle, TypedGroup

if TYPE_CHECKING:
    from interlace.robots.world_model.model import Transitions


class WorldModelGroup(TypedGroup, Protocol):
    """Group of the worker that fits the world model: robots/world_model/worker.py, WorldModelWorker."""

    def fit(
        self,
        folder: Path,
        step: int,
        bounds: tuple[tuple[float, ...], tuple[float, ...]],
        fresh: "Transitions",
        drawn: "Transitions",
    ) -> Handle[Metrics]:
        """Fits the newest model in a folder and publishes the result there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldLearning:
    """The world model of a run."""

    group: WorldModelGroup
    settings: WorldModelSettings
    folder: Path
    """Folder of published models, which imagined environments read."""
    decode: Callable[[IntArray], FloatArray]
    """Converts a turn's action tokens to actions, [K, A]."""
    bounds: tuple[tuple[float, ...], tuple[float, ...]]
    """[A] smallest and largest values of an action."""

    def drawn(self, replay: Replay, version: int) -> list[Sample]:
        """Draws the samples to fit the next model to."""
        return [one.sample for one in replay.draw(self.settings.fit_on, version=version)]

    async def fit(self, step: int, fresh: Sequence[Sample], drawn: Sequence[Sample]) -> Metrics:
        """Fits and publishes the model of a step. fresh: samples of the step, on which the last one is evaluated."""
        if not fresh or not drawn:
            return {}
        transitions = self._make_transitions(fresh), self._make_transitions(drawn)
        return await self.group.fit(self.folder, step, self.bounds, *transitions)

    def _make_transitions(self, samples: Sequence[Sample]) -> "Transitions":
        from interlace.robots.world_model.model import transitions_of

        array = IMAGE if self.settings.kind == "latent" else STATE
        return transitions_of(samples, self.decode, lambda sample: sample.reward_parts.get(SUCCESS, 0.0) > 0, array)
