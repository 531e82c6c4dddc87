"""A run of a recipe on this machine under faults, next to the same run without them."""

import contextlib
import heapq
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from interlace.core.errors import InterlaceError
from interlace.core.processes import list_children, read_command, read_name
from interlace.core.random import keyed_random
from interlace.core.types import TerminalEvent
from interlace.engines.rollout.services.process import GUARD, find_guards
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.jsonl import read_rows, read_transcripts
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.callbacks import Callbacks, StepInfo
from interlace.run.chaos.certificate import Certificate, EndedKey, FaultRecord, SampleCounts
from interlace.run.chaos.faults import EPISODE, TRAINED, FaultSpec
from interlace.run.chaos.phases import RunPhases
from interlace.run.equivalence import largest_difference, read_weights
from interlace.run.recipe.config import Recipe
from interlace.run.train import train
from interlace.runtime.process.child import process_name

LOOK_S, AIMED_LOOK_S = 0.05, 0.002
"""Seconds between two looks for processes, and between two looks at the phase for which a fault waits."""
REPORTED = ("rollout", "reference", *TRAINED)
"""Roles of which the run reports that a worker is back."""
_BACK = re.compile(r"(?P<role>\w+)(/\d+)? (is back|runs again)")
_STARTED = re.compile(rf"(?P<role>{'|'.join(TRAINED)}): micro-batches are .*")
"""Report about a role that trains, after the start of all its ranks with their weights."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Injector:
    """Thread that sends signals to the processes of a run at the times of its faults."""

    def __init__(self, faults: Sequence[FaultSpec], seed: int, engines: Path) -> None:
        """engines: folder of the records of the run's servers."""
        self._faults, self._seed, self._engines = faults, seed, engines
        self.phases = RunPhases()
        self._start_s = time.monotonic()
        self._due: list[tuple[float, int, FaultSpec]] = []
        """Heap of (time, number, fault)."""
        self._waiting: set[FaultSpec] = set()
        """Faults that were drawn and have not come."""
        self._targets: dict[str, dict[int, str]] = {}
        """Processes by role, each with its group."""
        self._num_due = self._last_step = 0
        self._lock, self._has_ended = threading.Lock(), threading.Event()
        self.records: list[FaultRecord] = []
        self._open: dict[int, tuple[int, FaultSpec, float, set[int]]] = {}
        """Faults without a replacement yet: by the place of the record, (target, fault, time, processes)."""
        self._thread = threading.Thread(target=self._work, name="chaos", daemon=True)

    def __enter__(self) -> Self:
        for fault in self._faults:
            if fault.at_s is not None:
                self._add_fault(self._start_s + fault.at_s, fault)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def on_step(self, info: StepInfo) -> None:
        """Draws the faults of the next step. Called after each step."""
        if info.step == info.num_steps or info.step <= self._last_step:
            return  # a run that starts again repeats steps, and their faults have happened
        self._last_step = info.step
        for fault in self._faults:
            place = fault.delay_in(info.step + 1, self._seed)
            if place is None:
                continue
            if fault.phase is None:
                self._add_fault(time.monotonic() + place * info.metrics.get("timing_s/step", 0.0), fault)
            elif fault not in self._waiting:  # a phase that not every step has gets one fault when it comes
                self._add_fault(time.monotonic(), fault)

    def _add_fault(self, at_s: float, fault: FaultSpec) -> None:
        self._waiting.add(fault)
        with self._lock:
            heapq.heappush(self._due, (at_s, self._num_due, fault))
            self._num_due += 1

    def _work(self) -> None:
        looked_s = -math.inf
        while not self._has_ended.wait(AIMED_LOOK_S if any(fault.phase for fault in [*self._waiting]) else LOOK_S):
            if time.monotonic() - looked_s >= LOOK_S:
                self._targets = {role: self._find_targets(role) for role in {fault.role for fault in self._faults}}
                self._note_replacements()
                looked_s = time.monotonic()
            # A fault whose role has no process at the moment waits until it has one.
            again = [due for due in self._take_due() if not self._inject_fault(due[2], due[1])]
            with self._lock:
                self._due += again
                heapq.heapify(self._due)

    def _take_due(self) -> list[tuple[float, int, FaultSpec]]:
        now_s, due = time.monotonic(), []
        with self._lock:
            while self._due and self._due[0][0] <= now_s:
                due.append(heapq.heappop(self._due))
        return due

    def _find_targets(self, role: str) -> dict[int, str]:
        """Returns the processes of a role, each with the group that it serves, or else its role."""
        ranks = {process: self.phases.find_group(process) or role for process in role_processes(role)}
        return ranks | (list_servers(self._engines) if role == "rollout" else {})

    def _inject_fault(self, fault: FaultSpec, number: int) -> bool:
        struck = {target for target, *_ in self._open.values()}
        phases = {
            process: self.phases.list_phases(group)
            for process, group in self._targets[fault.role].items()
            if process not in struck
        }
        found = sorted(process for process in phases if fault.phase in (None, *phases[process]))
        if not found:
            return False
        target = found[keyed_random("chaos target", self._seed, fault.text, number).randrange(len(found))]
        if target not in self._find_targets(fault.role):
            return False  # it has ended since the last lookup
        try:
            os.kill(target, SIGNALS[fault.kind])
        except ProcessLookupError:
            return False
        self._waiting.discard(fault)
        now_s = time.monotonic()
        self._open[len(self.records)] = (target, fault, now_s, {*phases})
        record = FaultRecord(
            fault=fault.text,
            role=fault.role,
            target=f"process {target}",
            phase=fault.phase or phases[target][0],
            at_s=now_s - self._start_s,
            recovered_s=None,
        )
        self.records.append(record)
        return True

    def _note_replacements(self) -> None:
        for place, (target, fault, since_s, before) in [*self._open.items()]:
            if fault.role in REPORTED:
                continue  # a new process is not yet a worker that serves: see record_recovery()
            now = {*self._targets[fault.role]}
            if target not in now and now - before:
                self._set_recovered(place, time.monotonic() - since_s)

    def record_recovery(self, role: str) -> None:
        """Notes that a lost worker serves again."""
        for place, (_, fault, since_s, _) in [*self._open.items()]:
            if fault.role == role:
                self._set_recovered(place, time.monotonic() - since_s)
                if role not in TRAINED:  # a start of the run replaces all its trainers
                    return

    def _set_recovered(self, place: int, seconds: float) -> None:
        self._open.pop(place, None)
        self.records[place] = replace(self.records[place], recovered_s=seconds)


class ChaosProgress(QuietProgress):
    """Progress of a run under faults, with notes of its evaluations and of workers that are back."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    def stage(self, name: str, done: int, total: int, note: str = "") -> None:
        del note
        self._injector.phases.note_stage(name, is_done=done == total)

    def say(self, text: str) -> None:
        if match := _BACK.fullmatch(text) or _STARTED.fullmatch(text):
            self._injector.record_recovery(match["role"])


NAMES = {EPISODE: ("episodes",), "env": ("environment", "env")}
"""Names of the processes by role, if another name than the role's: those that a fork server starts, and ranks."""
RANK_ON_RAY = "ray::RankActor"
"""Name of the process of a rank on Ray, of which a thread has the name of the role."""


def role_processes(role: str, of: int | None = None) -> list[int]:
    """Returns the processes of a role below a process (None: this one), oldest first."""
    below = _list_descendants(os.getpid() if of is None else of)
    guards = [each for each in below if role == "rollout" and GUARD in read_command(each)]
    if guards:
        return sorted(child for guard in guards for child in list_children(guard))
    wanted = {process_name(name) for name in NAMES.get(role, (role,))}
    return sorted(each for each in below if wanted & {*_list_names(each)})


def list_servers(engines: Path) -> dict[int, str]:
    """Returns the servers of a run's engines, which on Ray are no children of the run, each with its group.

    engines: folder of the records of the servers.
    """
    return {
        child: f"rollout/{number}" for guard, number in find_guards(engines).items() for child in list_children(guard)
    }


def _list_names(process: int) -> Sequence[str]:
    """Returns the names that mark a process: its name, or on Ray the names of its threads."""
    name = read_name(process)
    if name != RANK_ON_RAY:
        return (name,)
    with contextlib.suppress(OSError):  # the process has ended
        return [read_name(int(thread.name)) for thread in Path(f"/proc/{process}/task").iterdir()]
    return ()


def _list_descendants(process: int) -> Sequence[int]:
    return [each for child in list_children(process) for each in (child, *_list_descendants(child))]


TRAINED_COLUMNS = ("step", "uid", "index", "token_ids", "reward")


class _StepClock:
    """Time of the steps of a run, with the time between them, in which a run may start again."""

    def __init__(self) -> None:
        self._since_s = math.inf
        self._ends_s: dict[int, float] = {}
        """Time of the end of each step; of the last one, if a step was repeated."""

    def on_step(self, info: StepInfo) -> None:
        """Takes note of the end of a step. Called after each step."""
        now_s = time.monotonic()
        self._since_s = min(self._since_s, now_s - info.metrics.get("timing_s/step", 0.0))
        self._ends_s[info.step] = now_s

    @property
    def last_step(self) -> int:
        """Returns the newest step that ended; 0 if none did."""
        return max(self._ends_s, default=0)

    def seconds_to(self, step: int) -> float:
        """Returns the time from the begin of the first step to the end of a step."""
        return self._ends_s[step] - self._since_s if step else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    folder: RunFolder
    clock: _StepClock
    error: str = ""

    @property
    def staleness_max(self) -> float:
        """Returns the largest staleness of any trained sample, in versions."""
        rows = read_rows(self.folder.metrics)
        return max((float(row["sched/staleness_max"]) for row in rows), default=0.0)  # type: ignore[arg-type]

    @property
    def ended(self) -> list[EndedKey]:
        rows = read_transcripts(self.folder.samples)
        return [EndedKey(int(str(row["group"])), int(str(row["index"])), str(row["event"])) for row in rows]

    @property
    def trained(self) -> list[tuple[object, ...]]:
        """Returns the trained samples, sorted."""
        rows = [row for row in read_transcripts(self.folder.samples) if row["event"] == TerminalEvent.TRAINED]
        return sorted((tuple(row[name] for name in TRAINED_COLUMNS) for row in rows), key=str)

    @property
    def newest(self) -> Path:
        checkpoints = Checkpoints(self.folder.checkpoints, keep=1)
        return checkpoints.path(max(checkpoints.steps()))


def run_with_faults(
    recipe: Recipe, faults: Sequence[FaultSpec], scratch: Path, stop: StopSignal, say: Callable[[str], None]
) -> Certificate:
    """Trains a recipe without faults, then with them, and compares.

    scratch: folder for both runs. say: receives the name of each run as it begins. Raises InterlaceError if the run
    without faults fails, or after a stop.
    """
    quiet = recipe.logging.model_copy(update={"loggers": (), "timeline": False})
    recipe = recipe.model_copy(update={"logging": quiet})
    say("training without faults")
    folder, clock = RunFolder.create(scratch, "without-faults", overwrite=True), _StepClock()
    callbacks = Callbacks([clock.on_step])
    report = train(recipe, folder, resume=False, progress=QuietProgress(), stop=stop, callbacks=callbacks)
    if report.was_stopped:
        raise InterlaceError("stopped before the run with faults.")
    calm = _Outcome(folder=folder, clock=clock)
    say("training with faults")
    folder, clock, error = RunFolder.create(scratch, "with-faults", overwrite=True), _StepClock(), ""
    with Injector(faults, recipe.seed, folder.engines) as injector:
        callbacks = Callbacks([clock.on_step, injector.on_step])
        try:
            report = train(
                recipe,
                folder,
                resume=False,
                progress=ChaosProgress(injector),
                stop=stop,
                callbacks=callbacks,
                on_cluster=injector.phases.follow,
            )
        except InterlaceError as failure:
            error = str(failure)
    if not error and report.was_stopped:
        raise InterlaceError("stopped before the end of the run with faults.")
    return _compare_runs(recipe, injector, calm, _Outcome(folder=folder, clock=clock, error=error))


def _compare_runs(recipe: Recipe, injector: Injector, calm: _Outcome, rough: _Outcome) -> Certificate:
    schedule = recipe.schedule.resolved
    is_complete, is_exact = not rough.error, schedule.staleness_bound == 0
    counts = SampleCounts.of(rough.ended, recipe.samples_per_prompt)
    is_compared = is_complete and is_exact
    return Certificate(
        faults=injector.records,
        is_complete=is_complete,
        error=rough.error,
        events=counts.events,
        # A run that ended by an error does not know what became of the samples in flight.
        lost=counts.lost if is_complete else 0,
        duplicated=counts.duplicated,
        staleness_max=rough.staleness_max,
        staleness_bound=schedule.staleness_bound,
        step_s=rough.clock.seconds_to(rough.clock.last_step),
        step_s_without_faults=calm.clock.seconds_to(rough.clock.last_step),
        samples_equal=rough.trained == calm.trained if is_compared else None,
        weights_equal=largest_difference(read_weights(rough.newest), read_weights(calm.newest)) == 0
        if is_compared
        else None,
    )
