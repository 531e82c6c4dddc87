"""Simulating process: runs jobs on its environments one after another, and answers each with a pickle.

The simulators are chosen by the user and not written by a model, so their pickles can be trusted.
"""

import contextlib
import ctypes
import os
import pickle
import select
import socket
import time
from collections.abc import Callable, Sequence

import numpy as np

from interlace.core.errors import UserError
from interlace.robots.envs.base import VectorEnv, select_row
from interlace.robots.envs.load import create_envs
from interlace.robots.envs.slots import describe_error
from interlace.robots.envs.stepping import SimulatedEnvs
from interlace.rollouts.envs.spec import SimulatorError, SlotAnswer, SlotChunk, SlotJob
from interlace.runtime.process.child import become_child, frame_message, receive_frame

NO_JOB = 0xFFFFFFFF
"""Number of the messages of a process before its first answer: an EnvSpec, then PREPARED when it accepts jobs. A
UserError replaces either."""
PREPARED = "prepared"
GATHER_S = 0.002
"""Seconds that a family that steps many environments at once waits for the next job. The actions of a policy's batch
arrive one after another, and a call takes as long for one environment as for all."""


def serve_envs(
    connection: socket.socket,
    family: str,
    settings: dict[str, object],
    num_envs: int,
    devices: Sequence[str] = (),
) -> None:
    """Serves jobs until the run closes the connection or ends. devices: see EnvPool."""
    become_child()
    _hide_other_gpus(devices)
    # One thread per process, because several simulating processes share the cores.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    if "DISPLAY" not in os.environ and _is_there("libOSMesa.so.8"):
        os.environ.setdefault("MUJOCO_GL", "osmesa")  # without a screen MuJoCo's own choice cannot draw
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        try:
            envs = create_envs(family, settings, num_envs)
            connection.sendall(frame_message(NO_JOB, envs.spec))
            envs.prepare()
        except UserError as error:
            connection.sendall(frame_message(NO_JOB, error))
            return
        connection.sendall(frame_message(NO_JOB, PREPARED))
        running = None if isinstance(envs, SimulatedEnvs) else set[int]()
        while True:
            numbered = receive_jobs(connection, running)
            jobs = [job for _, job in numbered if isinstance(job, SlotJob)]
            answers = _answer_jobs(envs, jobs)
            if running is not None:
                _note_ends(running, jobs, answers)
            found = iter(answers)
            for number, job in numbered:
                answer = next(found) if isinstance(job, SlotJob) else SlotAnswer(error=job)
                connection.sendall(frame_message(number, answer))


def receive_jobs(connection: socket.socket, running: set[int] | None) -> list[tuple[int, SlotJob | UserError]]:
    """Waits for a job, then takes all that have arrived; returns them with their numbers.

    An error replaces a job that cannot be unpickled. running: environments whose episodes run. While one of them has no
    job here, the next job has GATHER_S to arrive. If None, one job is taken.
    """
    numbered = [_receive_job(connection)]
    while running is not None:
        lacking = running.difference(job.slot for _, job in numbered if isinstance(job, SlotJob))
        if not select.select([connection], [], [], GATHER_S if lacking else 0)[0]:
            break
        numbered.append(_receive_job(connection))
    return numbered


def _receive_job(connection: socket.socket) -> tuple[int, SlotJob | UserError]:
    """Waits for a job. Returns it, or the reason why it cannot be unpickled, with its number."""
    number, body = receive_frame(connection)
    try:
        job: SlotJob = pickle.loads(body)
    except Exception as error:  # noqa: BLE001 - it is the job's failure
        return number, UserError(f"a job of the simulator cannot be unpickled: {describe_error(error)}")
    return number, job


def _note_ends(running: set[int], jobs: Sequence[SlotJob], answers: Sequence[SlotAnswer]) -> None:
    """Adds the environments that were reset to `running`, and removes those whose episodes are over."""
    for job, answer in zip(jobs, answers, strict=True):
        if answer.error or (isinstance(answer.value, SlotChunk) and answer.value.ended):
            running.discard(job.slot)
        elif job.start is not None:
            running.add(job.slot)


def _hide_other_gpus(devices: Sequence[str]) -> None:
    """Hides all other GPUs from this process's CUDA, before any library initializes it."""
    numbers = [int(name.removeprefix("cuda:")) for name in devices if name.startswith("cuda:")]
    if numbers:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = seen.split(",") if seen else [str(number) for number in range(max(numbers) + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in numbers)


def _is_there(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _answer_jobs(envs: VectorEnv, jobs: Sequence[SlotJob]) -> list[SlotAnswer]:
    """Runs jobs. Jobs of one environment, such as the start and the chunks that restore an episode, run in order."""
    answers: list[SlotAnswer] = []
    batch: list[SlotJob] = []
    for job in jobs:
        if job.slot in [each.slot for each in batch]:
            answers += _answer_batch(envs, batch)
            batch = []
        batch.append(job)
    return answers + _answer_batch(envs, batch)


def _answer_batch(envs: VectorEnv, jobs: Sequence[SlotJob]) -> list[SlotAnswer]:
    """Runs jobs of different environments: chunks of equal length together, resets together, then the others."""
    found: dict[int, SlotAnswer] = {}
    together: dict[tuple[int, ...], list[int]] = {}
    for place, job in enumerate(jobs):
        if job.actions is not None:
            together.setdefault(job.actions.shape, []).append(place)
    for places in together.values():
        found |= dict(zip(places, _run_timed(_run_chunks, envs, [jobs[place] for place in places]), strict=True))
    resets = [place for place, job in enumerate(jobs) if job.start is not None]
    if len(resets) > 1:
        answers = _run_timed(_run_resets, envs, [jobs[place] for place in resets])
        if not answers[0].error:  # else each alone, so that only the start that failed gets the error
            found |= dict(zip(resets, answers, strict=True))
    for place, job in enumerate(jobs):
        if place not in found:
            [found[place]] = _run_timed(_run_resets if job.start is not None else _run_job, envs, [job])
    return [found[place] for place in range(len(jobs))]


def _run_timed(
    work: Callable[[VectorEnv, Sequence[SlotJob]], Sequence[object]], envs: VectorEnv, jobs: Sequence[SlotJob]
) -> list[SlotAnswer]:
    """Runs some jobs together and divides their processor seconds evenly."""
    began_s = time.process_time()
    values: Sequence[object]
    try:
        values = work(envs, jobs)
    except (UserError, SimulatorError) as error:
        values = [error] * len(jobs)
    busy_s = (time.process_time() - began_s) / len(jobs)
    return [
        SlotAnswer(error=value, busy_s=busy_s)
        if isinstance(value, Exception)
        else SlotAnswer(value=value, busy_s=busy_s)
        for value in values
    ]


def _run_resets(envs: VectorEnv, jobs: Sequence[SlotJob]) -> Sequence[object]:
    """Starts an episode in each of several environments."""
    starts = [job.start for job in jobs if job.start is not None]
    found = envs.reset(
        seeds=[start.seed for start in starts],
        task_ids=[start.task for start in starts],
        init_state_ids=[start.init_state for start in starts],
        slots=[job.slot for job in jobs],
    )
    return [select_row(found, row) for row in range(len(jobs))]


def _run_job(envs: VectorEnv, jobs: Sequence[SlotJob]) -> Sequence[object]:
    """Runs one job that is neither a chunk nor a reset."""
    [job] = jobs
    slots = [job.slot]
    if job.kind in ("offload", "onload"):
        (envs.offload if job.kind == "offload" else envs.onload)()
        return [None]
    return envs.render(slots) if job.kind == "render" else list(envs.expert_actions(slots, job.count))


def _run_chunks(envs: VectorEnv, jobs: Sequence[SlotJob]) -> list[SlotChunk | SimulatorError]:
    """Executes a chunk in each of several environments."""
    actions = np.stack([job.actions for job in jobs if job.actions is not None])
    result = envs.chunk_step(actions, [job.slot for job in jobs])
    return [
        SimulatorError(result.failures[row])
        if row in result.failures
        else SlotChunk(
            observation=select_row(result.observation, row),
            reward=result.reward[row],
            valid=result.valid[row],
            terminated=bool(result.terminated[row].any()),
            truncated=bool(result.truncated[row].any()),
            success=bool(result.success[row]),
        )
        for row in range(len(jobs))
    ]
