"""Jobs of an episode in its environment, and their results.

Shapes: K = actions of a chunk, A = numbers of one action.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from interlace.rollouts.envs.spec import Array, Observation, SimulatorError


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
