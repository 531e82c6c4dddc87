"""Random faults in random runs: counts what was injected, survived, lost and duplicated.

    python -m tests.random_faults virtual --faults 10000            # random schedules and workloads, virtual clock
    python -m tests.random_faults real --faults 100 --roles reward,rollout,actor

Each run is determined by its seed. Exits with 1 if a run hangs, ends early, loses or doubles a sample, exceeds its
bound of staleness, or, under a synchronous schedule, trains other samples than the run without faults.
"""

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.core.types import TerminalEvent
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.sim.process_faults import ProcessFault, ProcessFaults
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import Record, Workload, check, simulate

ROLES = ("rollout", "rollout", "reward", "reference")
SYNCHRONOUS_SHARE = 0.3
"""Share of the virtual runs under a synchronous schedule, which are compared with the run without faults."""
HANG_S = 60.0
"""Seconds of real time after which a virtual run counts as a hang; they take milliseconds."""


@dataclass(kw_only=True)
class Tally:
    """Counts over many runs."""

    num_runs: int = 0
    num_exact: int = 0
    """Runs whose trained samples were compared with those of the run without faults."""
    events: Counter[str] = field(default_factory=Counter)
    injected: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Faults that happened, by role and kind."""
    recovered_s: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Runs that broke a promise, each with its seed and the reason."""

    @property
    def num_faults(self) -> int:
        return sum(self.injected.values())

    def add(self, faults: ProcessFaults) -> None:
        for fault, seconds in faults.recovered_s.items():
            self.injected[fault.role, fault.kind] += 1
            self.recovered_s.setdefault((fault.role, fault.kind), []).append(seconds)

    def table(self) -> str:
        lines = ["| role | kind | injected | mean seconds to recover |", "|---|---|---|---|"]
        for (role, kind), count in sorted(self.injected.items()):
            seconds = self.recovered_s.get((role, kind), [])
            mean = f"{sum(seconds) / len(seconds):.1f}" if seconds else "not needed"
            lines.append(f"| {role} | {kind} | {count} | {mean} |")
        return "\n".join(lines)


def random_faults(rng: random.Random, most: int = 6) -> ProcessFaults:
    """Draws up to `most` faults, and the seconds that a process takes to start."""
    faults = [
        ProcessFault(
            name=str(number),
            role=rng.choice(ROLES),
            kind=rng.choice(["kill", "stop"]),
            at_s=rng.uniform(0, rng.choice([1, 10, 100])),
            instance=rng.randrange(8),
        )
        for number in range(rng.randint(1, most))
    ]
    return ProcessFaults(faults, rng.choice([0.0, 1.0, 50.0]))


def run_with(faults: ProcessFaults, schedule: Schedule, work: Workload) -> Record:
    """Simulates a workload under faults."""

    def cluster(devices: tuple[Device, ...], schedule: Schedule) -> SimCluster:
        return SimCluster(devices, schedule, hang_after_s=1e6, around=faults.around)

    return simulate(schedule, work, make_cluster=cluster)


def trained(record: Record) -> list[tuple[str, int, int]]:
    """Returns the trained samples, sorted."""
    ended = [entry.sample for entry in record.entries if entry.event == TerminalEvent.TRAINED]
    return sorted((sample.uid, sample.key.index, sample.num_tokens) for sample in ended)


def run_virtual(seed: int, tally: Tally) -> None:
    """Simulates one run and adds it to the tally. Raises AssertionError if a promise is broken."""
    rng = random.Random(seed)
    work, is_exact = random_workload(rng), rng.random() < SYNCHRONOUS_SHARE
    schedule = random_schedule(rng, work.num_devices, synchronous=is_exact)
    faults, start_s = random_faults(rng), time.monotonic()
    record = run_with(faults, schedule, work)
    tally.num_runs += 1
    tally.add(faults)
    tally.events.update(str(event) for event in record.ended.values())
    check(record, work, math.ceil(schedule.max_staleness))
    if is_exact:
        tally.num_exact += 1
        calm = run_with(ProcessFaults([], 0.0), schedule, work)
        assert trained(record) == trained(calm), "other samples than without faults"
    assert time.monotonic() - start_s < HANG_S, "a hang"


def run_all_virtual(num_faults: int, first_seed: int) -> Tally:
    """Simulates runs until this number of faults has happened."""
    tally, seed = Tally(), first_seed
    while tally.num_faults < num_faults:
        try:
            run_virtual(seed, tally)
        except Exception as error:
            tally.broken.append(f"seed {seed}: {type(error).__name__}: {error}")
        seed += 1
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clock", choices=["virtual"])
    parser.add_argument("--faults", type=int, default=10_000, help="number of faults to inject")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    given = parser.parse_args(arguments)
    start_s = time.monotonic()
    tally = run_all_virtual(given.faults, given.seed)
    print(tally.table())
    print(f"\n{tally.num_faults} faults in {tally.num_runs} runs in {time.monotonic() - start_s:.0f} s")
    print(f"samples: {', '.join(f'{count} {event}' for event, count in sorted(tally.events.items()))}")
    print(f"{tally.num_exact} synchronous runs trained the samples of the run without faults")
    print(f"broken: {len(tally.broken)}")
    for line in tally.broken[:20]:
        print(line)
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
