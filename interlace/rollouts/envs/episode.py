"""One episode in one environment, its film, and the source of such episodes."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.observe.films import Film
from interlace.rollouts.envs.jobs import JobKind, SlotChunk, SlotJob, Start
from interlace.rollouts.envs.spec import Array, EnvSpec, Observation

Around = Callable[[], AbstractContextManager[object]]
"""Returns the context manager around each wait for a simulator."""
Submit = Callable[[SlotJob], Awaitable[object]]
"""Runs a job of an environment; SlotAnswer describes the result."""


class FilmRecorder:
    """Records a picture after the reset and after each chunk. Passed to EnvEpisode.film()."""

    def __init__(self, name: str, *, label: str = "") -> None:
        """name: name of the film: the task and the initial state. label: see Film."""
        self._name, self._label = name, label
        self._frames: list[NDArray[np.uint8]] = []
        self.problem = ""
        """Reason why drawing failed; empty if it works."""

    def take(self, picture: NDArray[np.uint8]) -> None:
        self._frames.append(picture)

    def give_up(self, error: UserError) -> None:
        """Ends the recording; the episode continues without it."""
        self.problem = str(error)

    def film(self, caption: str) -> Film | None:
        """Returns the film; None without pictures. caption: the outcome of the episode."""
        if not self._frames:
            return None
        return Film(name=self._name, caption=caption, frames=tuple(self._frames), label=self._label)


class EnvEpisode:
    """One episode in one environment, after its reset. A call raises SimulatorError if the simulator fails."""

    def __init__(
        self, submit: Submit, slot: int, spec: EnvSpec, observation: Observation, around: Around = nullcontext
    ) -> None:
        """submit: runs the jobs of the environment `slot`."""
        self._submit, self._slot, self._around = submit, slot, around
        self._recorder: FilmRecorder | None = None
        self.spec = spec
        """Shapes and tasks of the family's environments."""
        self.observation = observation
        """Current observation; after the end of the episode, the final one."""

    async def chunk_step(self, actions: Array) -> SlotChunk:
        """Executes actions, [K, A], up to the one that ends the episode."""
        chunk: SlotChunk = await self.do("chunk", np.asarray(actions))
        self.observation = chunk.observation
        await self._record()
        return chunk

    async def film(self, recorder: FilmRecorder) -> None:
        """Records pictures from now on, without other effects. Without a renderer, the recorder stores the reason."""
        self._recorder = recorder
        await self._record()

    async def render(self) -> NDArray[np.uint8]:
        """Draws the current state, [H, W, 3]. Raises UserError without a renderer."""
        picture: NDArray[np.uint8] = await self.do("render")
        return picture

    async def expert_action(self) -> Array:
        """Returns a scripted expert's action for the current state, [A]. Raises UserError if the task has no expert."""
        action: Array = (await self.expert_actions(1))[0]
        return action

    async def expert_actions(self, count: int) -> Array:
        """Returns a scripted expert's next actions from the current state, [count, A], without changing the state.

        Raises UserError if the task has no expert.
        """
        actions: Array = await self.do("expert", count=count)
        return actions

    async def do(self, kind: JobKind, actions: Array | None = None, *, count: int = 1) -> Any:
        """Submits a job to the environment and returns its result. count: see SlotJob."""
        with self._around():
            return await self._submit(SlotJob(slot=self._slot, kind=kind, actions=actions, count=count))

    async def _record(self) -> None:
        if self._recorder is not None and not self._recorder.problem:
            try:
                self._recorder.take(await self.render())
            except UserError as error:
                self._recorder.give_up(error)


class Simulators(Protocol):
    """Environments that sessions lease: the run's, or a stand-in for them in another process."""

    def episode(self, start: Start, *, around: Around) -> AbstractAsyncContextManager[EnvEpisode]:
        """Leases an environment, reset to a start. around: a context that is entered for each wait."""
