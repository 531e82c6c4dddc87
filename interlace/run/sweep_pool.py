"""Runs of a sweep in parallel: processes of this machine, each with a share of its cores and GPUs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from interlace.core.errors import InterlaceError, UserError
from interlace.observe.progress import ProgressView
from interlace.observe.stop import StopSignal
from interlace.run.recipe.config import Recipe
from interlace.run.sweep_run import RunEnd, prepare_run
from interlace.runtime.machine import Machine, find_slots

POLL_S = 0.2
"""Seconds between two looks at the processes."""
LOG_FILE = "process.log"
"""File of a run with the output of its process."""
LAST_LINES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Devices of this machine for one run at a time."""

    cores: tuple[int, ...] = ()
    """Numbers of the cores. If empty, all."""
    gpus: tuple[int, ...] = ()
    """Numbers of the GPUs, as torch counts them here."""

    def __str__(self) -> str:
        named = [f"{name} {_ranges(numbers)}" for name, numbers in (("GPUs", self.gpus), ("cores", self.cores))]
        return ", ".join(text for text, numbers in zip(named, (self.gpus, self.cores), strict=True) if numbers)


@dataclass(slots=True)
class _Child:
    """A process that trains one run."""

    name: str
    path: Path
    share: Share
    process: "subprocess.Popen[str]"
    output: IO[str]
    """File with the outcome that the process writes. A pipe would stop a process whose error is long."""


def divide_devices(parallel: int, recipes: Sequence[Recipe]) -> list[Share]:
    """Returns the shares of `parallel` runs. Raises UserError if a recipe does not fit into its share.

    A run on a Ray cluster with an address gets no share, because Ray places its workers.
    """
    if parallel < 1:
        raise UserError(f"parallel = {parallel}: at least one run is trained at a time.")
    local = [recipe.cluster for recipe in recipes if recipe.cluster.address is None]
    if not local:
        return [Share() for _ in range(parallel)]
    from interlace.run.clusters.local import this_machine

    machine = this_machine()
    num_cores, num_gpus = machine.num_cores // parallel, len(machine.gpu_bytes) // parallel
    needs_gpus = bool(machine.gpu_bytes) and any(not cluster.devices.startswith("cpu") for cluster in local)
    if num_cores < 1 or (needs_gpus and num_gpus < 1):
        what = f"{len(machine.gpu_bytes)} GPUs" if needs_gpus else f"{machine.num_cores} cores"
        raise UserError(f"parallel = {parallel}: this machine has {what}, at least one for each run. Lower it.")
    part = Machine(
        num_cores=num_cores,
        memory_bytes=machine.memory_bytes // parallel,
        gpu_bytes=machine.gpu_bytes[:num_gpus],
        name=machine.name,
    )
    for cluster in local:
        try:
            find_slots(cluster.devices, [part])
        except UserError as error:
            share = f"{num_cores} cores and {num_gpus} GPUs"
            raise UserError(f"parallel = {parallel} gives each run {share}, which do not suffice: {error}") from None
    numbers = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [
        Share(
            cores=tuple(numbers[place * num_cores : (place + 1) * num_cores]),
            gpus=tuple(range(place * num_gpus, (place + 1) * num_gpus)),
        )
        for place in range(parallel)
    ]


def train_in_parallel(
    runs: Mapping[Path, Recipe], shares: Sequence[Share], progress: ProgressView, stop: StopSignal
) -> Generator[tuple[str, RunEnd], None, None]:
    """Trains runs, one for each share at a time. Yields (name, end) when a run has ended.

    After a request to stop, running processes end at the end of a step and no other run starts.
    """
    waiting, free, children = list(runs.items()), list(shares), list[_Child]()
    try:
        while children or (waiting and not stop.requested):
            yield from _start_waiting(waiting, free, children, progress, stop)
            if stop.requested:
                _request_stop(children)
            for child in [each for each in children if _has_ended(each)]:
                children.remove(child)
                free.append(child.share)
                yield child.name, _read_end(child)
    finally:
        for child in children:  # after a second request, or an error of the sweep
            child.process.kill()
            child.process.wait()
            child.output.close()


def _start_waiting(
    waiting: list[tuple[Path, Recipe]],
    free: list[Share],
    children: list[_Child],
    progress: ProgressView,
    stop: StopSignal,
) -> Iterator[tuple[str, RunEnd]]:
    """Starts waiting runs on free shares. Yields the runs whose folder or process cannot be made."""
    while waiting and free and not stop.requested:
        path, recipe = waiting.pop(0)
        try:
            children.append(_start(path, recipe, free[0]))
        except (OSError, InterlaceError) as error:
            yield path.name, RunEnd(is_finished=False, error=str(error))
            continue
        share = free.pop(0)
        progress.say(f"run {path.name} starts{f' on {share}' if str(share) else ''}")


def _start(path: Path, recipe: Recipe, share: Share) -> _Child:
    from interlace.engines.rollout.kinds.base import visible_devices

    prepare_run(path, recipe)
    arguments = [",".join(map(str, share.cores))] if share.cores else []
    environment = {**os.environ, **(visible_devices(tuple(f"cuda:{gpu}" for gpu in share.gpus)) if share.gpus else {})}
    with contextlib.ExitStack() as unless_started, (path / LOG_FILE).open("a", encoding="utf-8") as log:
        output = unless_started.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
        process = subprocess.Popen(
            [sys.executable, "-m", "interlace.run.sweep_run", str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which stops its runs
        )
        unless_started.pop_all()
    return _Child(path.name, path, share, process, output)


def _request_stop(children: Sequence[_Child]) -> None:
    for child in children:
        if child.process.stdin and not child.process.stdin.closed:
            child.process.stdin.close()


def _has_ended(child: _Child) -> bool:
    try:
        child.process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _read_end(child: _Child) -> RunEnd:
    _request_stop([child])
    with child.output as output:
        output.seek(0)
        lines = output.read().splitlines()
    if lines:  # the process wrote it last; a thread of a stopped run may abort the process at its exit
        return RunEnd(**json.loads(lines[-1]))
    log = (child.path / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    status = child.process.returncode
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
    reason = f": {' '.join(log[-LAST_LINES:])} ({child.path / LOG_FILE})" if log else ""
    return RunEnd(is_finished=False, error=f"the process {how}{reason}")


def _ranges(numbers: Sequence[int]) -> str:
    if numbers and list(numbers) == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
