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
from interlace.runtime.handle import Handle
from interlace.runtime.typed_group import TypedGroup

if TYPE_CHECKING:
    from interlace.robots.world_model.model import Transitions
    from interlace.robots.world_model.worker import FitWork


class WorldModelGroup(TypedGroup, Protocol):
    """Group of the worker that fits the world model: robots/world_model/worker.py, WorldModelWorker."""

    def fit(self, folder: Path, work: "FitWork") -> Handle[Metrics]:
        """Fits the newest model in a folder and publishes the result there."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldLearning:
    """The world model of a run."""

    group: WorldModelGroup
    settings: WorldModelSettings
    folder: Path
    """Folder of published models, which imagined environments read."""
    decode: Callable[[IntArray], FloatArray]
    """Converts a turn's action tokens to actions, [K, A]."""
    low: tuple[float, ...]
    """[A] smallest values of an action."""
    high: tuple[float, ...]
    """[A] largest values of an action."""

    def drawn(self, replay: Replay, version: int) -> list[Sample]:
        """Draws the samples to fit the next model to."""
        return [one.sample for one in replay.draw(self.settings.fit_on, version=version)]

    async def fit(self, step: int, fresh: Sequence[Sample], drawn: Sequence[Sample]) -> Metrics:
        """Fits and publishes the model of a step. fresh: samples of the step, on which the previous model is evaluated
        first.
        """
        from interlace.robots.world_model.worker import FitWork

        if not fresh or not drawn:
            return {}
        work = FitWork(
            step=step,
            low=self.low,
            high=self.high,
            fresh=self._make_transitions(fresh),
            drawn=self._make_transitions(drawn),
        )
        return await self.group.fit(self.folder, work)

    def _make_transitions(self, samples: Sequence[Sample]) -> "Transitions":
        from interlace.robots.world_model.model import transitions_of

        array = IMAGE if self.settings.kind == "latent" else STATE
        return transitions_of(samples, self.decode, lambda sample: sample.reward_parts.get(SUCCESS, 0.0) > 0, array)
