"""Injection of faults into the processes of a run, on a thread next to it."""

import heapq
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from interlace.core.random import keyed_random
from interlace.observe.progress import QuietProgress
from interlace.run.callbacks import StepInfo
from interlace.run.chaos.certificate import FaultRecord
from interlace.run.chaos.faults import FaultSpec
from interlace.run.chaos.processes import role_processes

LOOK_S = 0.05
"""Seconds between two looks for processes."""
REPORTED = ("rollout", "reference")
"""Roles of which the run reports that a worker is back."""
_BACK = re.compile(r"(?P<role>\w+)(/\d+)? (is back|runs again)")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Injector:
    """Thread that sends signals to the processes of a run at the times of its faults."""

    def __init__(self, faults: Sequence[FaultSpec], seed: int) -> None:
        self._faults, self._seed = faults, seed
        self._start_s = time.monotonic()
        self._due: list[tuple[float, int, FaultSpec]] = []
        """Heap of (time, number, fault)."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    def on_step(self, info: StepInfo) -> None:
        """Draws the faults of the next step. Called after each step."""
        if info.step == info.num_steps or info.step <= self._last_step:
            return  # a run that starts again repeats steps, and their faults have happened
        self._last_step = info.step
        for fault in self._faults:
            place = fault.delay_in(info.step + 1, self._seed)
            if place is not None:
                self._add_fault(time.monotonic() + place * info.metrics.get("timing_s/step", 0.0), fault)

    def _add_fault(self, at_s: float, fault: FaultSpec) -> None:
        with self._lock:
            heapq.heappush(self._due, (at_s, self._num_due, fault))
            self._num_due += 1

    def _work(self) -> None:
        while not self._has_ended.wait(LOOK_S):
            self._note_replacements()
            # A fault whose role has no process at the moment waits until it has one.
            waiting = [due for due in self._take_due() if not self._inject_fault(due[2], due[1])]
            with self._lock:
                self._due += waiting
                heapq.heapify(self._due)

    def _take_due(self) -> list[tuple[float, int, FaultSpec]]:
        now_s, due = time.monotonic(), []
        with self._lock:
            while self._due and self._due[0][0] <= now_s:
                due.append(heapq.heappop(self._due))
        return due

    def _inject_fault(self, fault: FaultSpec, number: int) -> bool:
        struck = {target for target, *_ in self._open.values()}
        found = [process for process in role_processes(fault.role) if process not in struck]
        if not found:
            return False
        target = found[keyed_random("chaos target", self._seed, fault.text, number).randrange(len(found))]
        try:
            os.kill(target, SIGNALS[fault.kind])
        except ProcessLookupError:
            return False
        now_s = time.monotonic()
        self._open[len(self.records)] = (target, fault, now_s, {*found})
        record = FaultRecord(fault=fault.text, target=f"process {target}", at_s=now_s - self._start_s, recovered_s=None)
        self.records.append(record)
        return True

    def _note_replacements(self) -> None:
        for place, (target, fault, since_s, before) in [*self._open.items()]:
            if fault.role in REPORTED:
                continue  # a new process is not yet a worker that serves: see record_recovery()
            now = {*role_processes(fault.role)}
            if target not in now and now - before:
                self._set_recovered(place, time.monotonic() - since_s)

    def record_recovery(self, role: str) -> None:
        """Notes that a lost worker serves again."""
        for place, (_, fault, since_s, _) in [*self._open.items()]:
            if fault.role == role:
                self._set_recovered(place, time.monotonic() - since_s)
                return

    def _set_recovered(self, place: int, seconds: float) -> None:
        old = self.records[place]
        self._open.pop(place, None)
        self.records[place] = FaultRecord(fault=old.fault, target=old.target, at_s=old.at_s, recovered_s=seconds)


class ChaosProgress(QuietProgress):
    """Progress of a run under faults, with a note when a worker is back."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    def say(self, text: str) -> None:
        if match := _BACK.fullmatch(text):
            self._injector.record_recovery(match["role"])
