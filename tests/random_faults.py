"""Random faults in random runs: counts what was injected, survived, lost and duplicated.

    python -m tests.random_faults virtual --faults 10000            # random schedules and workloads, virtual clock
    python -m tests.random_faults real --faults 100 --roles reward,rollout,actor    # for each role, on this machine
    python -m tests.random_faults real --faults 20 --roles ray,ray-actor            # the same on Ray
    python -m tests.random_faults real --faults 20 --roles reward --phases all      # in each phase of the run

Each run is determined by its seed. Exits with 1 if a run hangs, ends early, loses or doubles a sample, exceeds its
bound of staleness, or, under a synchronous schedule, trains other samples than the run without faults.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from interlace.core.errors import UserError
from interlace.core.types import TerminalEvent
from interlace.run.chaos.phases import PHASES
from interlace.runtime.sim.cluster import ProcessFault, ProcessFaults, SimCluster
from interlace.schedule.equivalents import refuse_races
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.robots import SMALL as ROBOT
from tests.support.sim_run import Record, Workload, check, simulate
from tests.support.training import SMALL

ROLES = ("rollout", "rollout", "reward", "reference")
SYNCHRONOUS_SHARE = 0.3
"""Share of the virtual runs under a synchronous schedule, which are compared with the run without faults."""
LIMIT_S = 1200.0
"""Seconds of a command with real faults."""
ALL_PHASES = ("checkpoint_every=1", "eval_every=2", "evaluation.num_prompts=2", "warmup=null")
"""Settings under which faults, which come at random times of a step, strike in checkpoints and evaluations as well."""
ON_RAY = ("cluster.backend=ray", "recovery.restarts_per_hour={trainer: 1000}")
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
    if is_exact and not _is_timed(schedule, work):
        tally.num_exact += 1
        calm = run_with(ProcessFaults([], 0.0), schedule, work)
        assert trained(record) == trained(calm), "other samples than without faults"
    assert time.monotonic() - start_s < HANG_S, "a hang"


def _is_timed(schedule: Schedule, work: Workload) -> bool:
    """Returns whether timing decides which samples are trained."""
    try:
        refuse_races(schedule)
    except UserError:
        return True
    # With a limit of prompts that replace dropped groups, the first step of a version to need them gets them.
    return schedule.sync_every > 1 and work.refill_rounds < 10


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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe whose processes of one role, or of several, are struck."""

    recipe: str
    settings: Sequence[str]
    roles: Sequence[str] = ()
    """Roles that are struck. Empty for the role of the case's name."""
    kinds: Sequence[str] = ("kill", "stop")
    per_step: float = 1.0
    """Faults of each kind and role in a step."""


CASES = {
    "reward": Case(recipe="quickstart", settings=(*SMALL, *ALL_PHASES, "reward.workers=2")),
    "episode": Case(
        recipe="quickstart",
        settings=(
            *SMALL, *ALL_PHASES, "episode.name=tests.support.worker_episodes:ThreeTurns", "episode.workers=2"
        ),
    ),
    "env": Case(
        recipe="robot-cartpole", settings=(*ROBOT, *ALL_PHASES, "episode.env.workers=2"), per_step=0.5
    ),
    "rollout": Case(recipe="quickstart", settings=(*SMALL, *ALL_PHASES, "rollout=interlace"), per_step=0.5),
    "actor": Case(
        recipe="quickstart",
        settings=(*SMALL, *ALL_PHASES, "actor.ranks=2", "recovery.restarts_per_hour={trainer: 1000}"),
        kinds=("kill",),
        per_step=0.2,
    ),
    "ray": Case(
        recipe="quickstart",
        settings=(*SMALL, *ALL_PHASES, *ON_RAY, "algorithm.kl_coefficient=0.1", "reward.workers=1"),
        roles=("rollout", "reward", "reference"),
        per_step=0.2,
    ),
    "ray-actor": Case(
        recipe="quickstart", settings=(*SMALL, *ALL_PHASES, *ON_RAY), roles=("actor",), per_step=0.2
    ),
}  # fmt: skip
"""Cases by role, each under a synchronous schedule, so that the weights are compared with those without faults."""


def run_real(role: str, num_faults: int, seed: int, phases: Sequence[str]) -> tuple[list[str], bool]:
    """Runs `interlace chaos` with about this number of faults, at most. Returns the lines of a table, and whether all
    held. phases: units of the rates of faults.
    """
    case = CASES[role]
    pairs = [(kind, each) for each in case.roles or (role,) for kind in case.kinds]
    rate = case.per_step / math.sqrt(len(phases))
    steps = max(3, math.ceil(num_faults / (rate * len(pairs) * len(phases))))
    faults = ",".join(f"{kind}:{each}@{rate:.2g}/{phase}" for kind, each in pairs for phase in phases)
    command = [sys.executable, "-c", "from interlace.cli.main import app; app()", "chaos", case.recipe]
    with tempfile.TemporaryDirectory() as folder:
        settings = [*case.settings, f"steps={steps}", f"seed={seed}", f"model.cache_dir={folder}"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [*command, *settings, "--faults", faults, "--json"],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    try:
        found = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return [f"| {role} | failed: {ended.stderr[-500:]} |"], False
    lines = []
    for kind, each in pairs:
        rows = [row for row in found["faults"] if row["fault"].startswith(f"{kind}:{each}@")]
        needed = sorted(row["recovered_s"] for row in rows if row["recovered_s"] is not None)
        spread = f"{needed[0]:.1f} to {needed[-1]:.1f}" if needed else "none needed"
        survived = len(rows) if not found["error"] else found["survived"]
        equal = {True: "equal", False: "NOT equal"}.get(found["weights_equal"], "not compared")
        struck = Counter(row["phase"] for row in rows)
        by_phase = ", ".join(f"{struck[phase]} {phase}" for phase in PHASES if struck[phase])
        lines.append(
            f"| {kind} | {each} | {len(rows)} | {survived} | {by_phase} | {spread} | {found['lost']} "
            f"| {found['duplicated']} | {equal} | {found['effective_time']:.0%} |"
        )
    if found["error"]:
        lines.append(f"ended early: {found['error'][:500]}")
    return lines, bool(found["holds"])


def print_real(roles: Sequence[str], num_faults: int, seed: int, phases: Sequence[str]) -> int:
    """Prints the table of real faults. Returns the exit status."""
    columns = ("kind", "role", "injected", "survived", "in phase", "seconds to recover", "lost", "duplicated",
               "weights", "effective time")  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    do_hold = True
    for role in roles:
        lines, holds = run_real(role, num_faults, seed, phases)
        do_hold = do_hold and holds
        print("\n".join(lines), flush=True)
    return 0 if do_hold else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clock", choices=["virtual", "real"])
    parser.add_argument("--faults", type=int, default=10_000, help="number of faults; real: of each role")
    parser.add_argument("--roles", default=",".join(CASES), help="real: roles to strike")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--phases", default="step", help="real: phases in which faults come; all; step: at any time")
    given = parser.parse_args(arguments)
    if given.clock == "real":
        phases = PHASES if given.phases == "all" else given.phases.split(",")
        return print_real(given.roles.split(","), given.faults, given.seed, phases)
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
