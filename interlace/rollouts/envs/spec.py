"""Environments as episodes see them: inputs and outputs, jobs and their results, and the source of episodes.

Shapes: K = actions of a chunk, A = numbers of one action.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import EpisodeLostError, UserError
from interlace.core.types import FloatArray
from interlace.observe.films import Film

Array: TypeAlias = NDArray[np.generic]
Observation: TypeAlias = Mapping[str, Array]
"""Named arrays: `state` is [D] float32, an image is [H, W, 3] uint8 and upright; [n, ...] for n environments."""


class SimulatorError(EpisodeLostError):
    """A simulator failed during an episode: it raised an error, returned NaN, hung, or its process died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """Shape of one array of an observation, without [n]."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the numpy type: `float32`, `uint8`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ActionSpec:
    """Shape of an action: A numbers between bounds, or one choice among several."""

    low: FloatArray
    """[A] smallest values; smaller actions are clipped."""
    high: FloatArray
    """[A] largest values; larger actions are clipped."""
    num_choices: int | None = None
    """Number of choices, if an action is one integer from 0, [1]; None for continuous actions."""

    @property
    def size(self) -> int:
        return len(self.low)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvSpec:
    """Properties of a family's environments that a policy must know."""

    observation: Mapping[str, ArraySpec]
    action: ActionSpec
    tasks: tuple[str, ...]
    """Names of the tasks; a task's id is its index."""
    instructions: tuple[str, ...]
    """One instruction per task; empty if neither the family nor the settings define one."""
    horizon: int
    """Largest number of actions per episode; the episode is then truncated."""

    def check_chunk(self, num_actions: int) -> None:
        """Raises UserError if a chunk of `num_actions` is longer than an episode."""
        if not 1 <= num_actions <= self.horizon:
            raise UserError(
                f"a chunk has {num_actions} actions, and an episode at most {self.horizon} (env.horizon); "
                "make the chunk shorter or the horizon longer"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start of an episode."""

    task: int
    """Id of the task."""
    init_state: int
    """Id of the initial state, an integer from 0: the same id gives the same state in every process."""
    seed: int = 0
    """Seed of the noise after the start, in simulators with noise."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotChunk:
    """Result of one chunk in one environment."""

    observation: Observation
    """Observation after the last valid action: the final one if the episode ended."""
    reward: NDArray[np.float32]
    """[K] rewards, 0 for an invalid action."""
    valid: NDArray[np.bool_]
    """[K] True on executed actions, which come first."""
    terminated: bool
    """True if the task ended the episode: no bootstrap."""
    truncated: bool
    """True if the horizon ended the episode: bootstrap from `observation`."""
    success: bool
    """True if the task has been solved since the reset."""

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


JobKind: TypeAlias = Literal["reset", "chunk", "render", "expert", "offload", "onload"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotJob:
    """Job of one environment. Offload and onload apply to a whole process; `slot` is any of its slots."""

    slot: int
    kind: JobKind
    start: Start | None = None
    """Start of the episode; set for a reset."""
    actions: Array | None = None
    """[K, A] actions; set for a chunk."""
    count: int = 1
    """Number of the expert's actions."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotAnswer:
    """Result of a job."""

    value: object = None
    """Observation after a reset, SlotChunk, [H, W, 3] picture, or [count, A] actions of the expert."""
    error: Exception | None = None
    """UserError, or SimulatorError if the simulator failed."""
    busy_s: float = 0.0
    """Processor seconds of the job."""

    def settle(self, future: "asyncio.Future[object]") -> None:
        """Sets the result of a future, unless it was cancelled."""
        if future.done():
            return
        if self.error:
            future.set_exception(self.error)
        else:
            future.set_result(self.value)


class EpisodeHistory:
    """Jobs that restore episodes: the start and the chunks of each, which determine the state of its environment."""

    def __init__(self) -> None:
        self._jobs: dict[int, list[SlotJob]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: SlotJob, answer: SlotAnswer) -> None:
        """Adds a job that succeeded. A failure of the simulator ends the episode."""
        if isinstance(answer.error, SimulatorError):
            self.forget(job.slot)
        elif answer.error is None and job.kind == "reset":
            self._jobs[job.slot] = [job]
        elif isinstance(answer.value, SlotChunk) and job.slot in self._jobs:
            self._jobs[job.slot].append(job)

    def forget(self, slot: int) -> None:
        self._jobs.pop(slot, None)

    def list_jobs(self) -> list[SlotJob]:
        """Returns the jobs. The jobs of one episode are in order."""
        return [job for jobs in self._jobs.values() for job in jobs]


@dataclass(kw_only=True, slots=True)
class EnvCounts:
    """Counts of a fleet since its start."""

    num_resets: int = 0
    num_actions: int = 0
    """Executed actions; each may be several steps of the simulator."""
    busy_s: float = 0.0
    """Processor seconds spent in simulators."""
    num_broken: int = 0
    """Episodes that ended because their simulator raised an error or returned NaN."""
    num_died: int = 0
    """Episodes that ended because their process died."""
    num_hung: int = 0
    """Episodes that ended because a chunk or a reset took longer than env.timeout_s."""
    num_brought_back: int = 0
    """Episodes that a new process restored."""

    @property
    def num_failed(self) -> int:
        """Episodes whose simulator failed, for any reason."""
        return self.num_broken + self.num_died + self.num_hung

    def add(self, work: SlotJob, value: object) -> None:
        """Counts a job that has succeeded. value: its result."""
        if work.kind == "reset":
            self.num_resets += 1
        elif isinstance(value, SlotChunk):
            self.num_actions += int(value.valid.sum())

    def plus(self, other: "EnvCounts") -> "EnvCounts":
        return EnvCounts(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvBatch:
    """Results of a batch of jobs."""

    answers: Sequence[SlotAnswer]
    """One answer per job, in the jobs' order."""
    counts: EnvCounts
    """Counts of the processes since their start."""


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
