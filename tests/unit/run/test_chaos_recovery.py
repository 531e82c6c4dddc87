"""The time to recover from a fault ends when the worker serves again."""

import time
from pathlib import Path

import pytest

from interlace.run.chaos.certificate import FaultRecord
from interlace.run.chaos.faults import parse_faults
from interlace.run.chaos.real import ChaosProgress, Injector


@pytest.mark.parametrize(
    ("role", "notes", "num_recovered"),
    [
        ("actor", ["resuming after step 2 from x", "critic: micro-batches are padded"], 0),
        ("actor", ["actor: micro-batches are packed, without padding"], 2),
        ("rollout", ["rollout/0 is back"], 1),
        ("rollout", ["rollout/0 runs again", "rollout/1 runs again"], 2),
    ],
)
def test_a_worker_has_recovered_when_the_run_reports_it(
    tmp_path: Path, role: str, notes: list[str], num_recovered: int
) -> None:
    """A trainer counted as recovered when its new process existed, long before it had its weights."""
    [fault] = parse_faults(f"kill:{role}@1/step")
    injector = Injector([fault], 0, tmp_path)
    for process in (1, 2):
        injector._open[len(injector.records)] = process, fault, time.monotonic(), {1, 2}
        injector.records.append(
            FaultRecord(fault=fault.text, role=role, target=f"process {process}", at_s=0.0, recovered_s=None)
        )
    injector._targets = {role: {3: f"{role}/0", 4: f"{role}/0"}}
    injector._note_replacements()
    assert [record.recovered_s for record in injector.records] == [None, None]
    progress = ChaosProgress(injector)
    for note in notes:
        progress.say(note)
    assert sum(record.recovered_s is not None for record in injector.records) == num_recovered
