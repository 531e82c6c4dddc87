"""The process that simulates: does jobs on its environments one after another, each answered by a pickle.

Simulators are code that a user chose to run, and no code that a model wrote, so that pickles may come back from them.
"""

import contextlib
import ctypes
import os
import socket
import time
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.envs.base import Start, VectorEnv
from interlace.envs.load import create_envs
from interlace.envs.spec import Array, Observation, SimulatorError
from interlace.runtime.process.child import become_child, framed, receive

NO_JOB = 0xFFFFFFFF
"""Number of the message that a process begins with: an EnvSpec, or the UserError that there is none by."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotChunk:
    """Result of one chunk in one environment."""

    observation: Observation
    """Observation after the last action that counted: the final one, where the episode ended."""
    reward: NDArray[np.float32]
    """[K], 0 where an action did not count."""
    valid: NDArray[np.bool_]
    """[K] True on actions that were carried out, which come first."""
    terminated: bool
    """True where the task itself ended the episode: no bootstrap."""
    truncated: bool
    """True where the horizon ended it: bootstrap from `observation`."""
    success: bool
    """True where the task was solved since the reset."""

    @property
    def ended(self) -> bool:
        """Says whether the episode is over."""
        return self.terminated or self.truncated


JobKind: TypeAlias = Literal["reset", "chunk", "render", "expert"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotJob:
    """Work on one environment."""

    slot: int
    kind: JobKind
    start: Start | None = None
    """Beginning of the episode, of a reset."""
    actions: Array | None = None
    """[K, A], of a chunk."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotAnswer:
    """Result of a job."""

    value: object = None
    """Observation of a reset, SlotChunk, [H, W, 3] picture, or [A] action of the expert."""
    error: Exception | None = None
    """UserError, or SimulatorError where the simulator broke."""
    busy_s: float = 0.0
    """Processor seconds that the job took."""


def serve_envs(connection: socket.socket, family: str, settings: dict[str, object], num_envs: int) -> None:
    """Runs in the process until the run closes the connection or ends."""
    become_child()
    # One thread a process: simulators side by side share the cores by being several processes.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    if "DISPLAY" not in os.environ and _is_there("libOSMesa.so.8"):
        os.environ.setdefault("MUJOCO_GL", "osmesa")  # without a screen MuJoCo's own choice cannot draw
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        try:
            envs = create_envs(family, settings, num_envs)
        except UserError as error:
            connection.sendall(framed(NO_JOB, error))
            return
        connection.sendall(framed(NO_JOB, envs.spec))
        while True:
            number, job = receive(connection)
            began_s = time.process_time()
            try:
                answer = SlotAnswer(value=_done(envs, job), busy_s=time.process_time() - began_s)
            except (UserError, SimulatorError) as error:
                answer = SlotAnswer(error=error, busy_s=time.process_time() - began_s)
            connection.sendall(framed(number, answer))


def _is_there(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _done(envs: VectorEnv, job: SlotJob) -> object:
    slots = [job.slot]
    if job.start is not None:
        start = job.start
        found = envs.reset(seeds=[start.seed], task_ids=[start.task], init_state_ids=[start.init_state], slots=slots)
        return _first(found)
    if job.actions is not None:
        return _chunk(envs, slots, job.actions)
    return envs.render(slots)[0] if job.kind == "render" else envs.expert_actions(slots)[0]


def _chunk(envs: VectorEnv, slots: list[int], actions: Array) -> SlotChunk:
    result = envs.chunk_step(actions[None], slots)
    if result.failures:
        raise SimulatorError(result.failures[0])
    return SlotChunk(
        observation=_first(result.observation),
        reward=result.reward[0],
        valid=result.valid[0],
        terminated=bool(result.terminated.any()),
        truncated=bool(result.truncated.any()),
        success=bool(result.success[0]),
    )


def _first(observation: Observation) -> Observation:
    return {name: array[0] for name, array in observation.items()}
