"""Whole GRPO steps against TRL: generation, scoring, training and weight sync, in tokens per wall and per CPU second.

All train the same 0.85-million-parameter Qwen2 on the same prompts, 8 prompts x 8 samples per step, with the same
forced response lengths: `uniform`, all 64 tokens, or `longtail`, lognormal around 64 with sigma 1, the longest 512.

- `one-core`: interlace, synchronous and colocated, in one process (`cluster=local`, `verl-colocated`), against TRL's
  GRPOTrainer in one process, with `generate` (training on all samples at once, and on 16) and with its continuous
  batching.
- `two-threads`: the same on two cores, in one process that trains with two threads and generates on two engines,
  against TRL in one process of two threads, and on two data-parallel ranks with one thread each.
- `two-processes`: interlace, asynchronous, with generation and training in separate processes (`cluster=ray`, `areal`
  with half of the devices each), against the same.

The contestants are processes that stay alive and take turns of some steps, one at a time, so a ratio compares
neighbours in time. For a run that generates ahead, the first two steps of a turn are not counted: they use up earlier
generation.
CPU seconds include a contestant's process and its descendants, also Ray's processes. With forced lengths, interlace's
engine and TRL's continuous batching get each response's length when it starts, and use it only to end there.

    python benchmarks/end_to_end.py [--case one-core|two-threads|two-processes] [--lengths uniform|longtail]
        [--rounds 3] [--json end_to_end.json]

TRL is installed with `pip install trl`; without it only interlace is measured.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _step_task import Block, tree_cpu_s, write_task
from rich.console import Console

from interlace.observe.goodput import Ledger
from interlace.observe.tables import goodput_table

HERE = Path(__file__).parent
OURS = "interlace"
SETTINGS = {
    "one-core": ("schedule=verl-colocated",),
    "two-threads": ("schedule=verl-colocated", "cluster.devices=cpu:2", "cluster.threads_per_worker=2"),
    "two-processes": ("schedule=areal", "cluster.backend=ray", "cluster.devices=cpu:2"),
}
"""Settings of interlace by case."""
MICROBATCH = "16"
"""Samples that TRL trains on at once in the variant with micro-batches; this number is the fastest."""
ON_ONE_CORE = (
    ("trl, generate", "generate", "1", "1"),
    (f"trl, generate {MICROBATCH}", "generate", "1", "1", MICROBATCH),
    (f"trl, continuous {MICROBATCH}", "continuous", "1", "1", MICROBATCH),
)
"""Variants of TRL: name, generation, ranks, threads per rank, and samples at once."""
ON_TWO_CORES = (
    ("trl, 2 threads", "generate", "1", "2"),
    (f"trl, 2 threads, {MICROBATCH}", "generate", "1", "2", MICROBATCH),
    ("trl, 2 ranks", "generate", "2", "1"),
    (f"trl, 2 ranks, {MICROBATCH}", "generate", "2", "1", MICROBATCH),
)
STEPS_A_TURN = {OURS: 4}
"""Steps per turn; one for TRL, whose steps are long."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant at one length distribution."""

    case: str
    lengths: str
    contestant: str
    step_s: float
    """Median over the turns."""
    tokens_per_s: float
    tokens_per_cpu_s: float
    wall_ratio: float
    """Median over the rounds of interlace's tokens per second divided by this contestant's."""
    wall_ratio_range: tuple[float, float]
    cpu_ratio: float
    """The same for tokens per CPU second."""
    cpu_ratio_range: tuple[float, float]
    bins: dict[str, float]
    """Seconds by activity, as the contestant reports them, summed over its turns."""


class Contestant:
    """A process that takes turns."""

    def __init__(self, name: str, script: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.blocks: list[Block] = []
        command = [sys.executable, str(HERE / script), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def turn(self, num_steps: int) -> Block:
        """Lets the process run a number of steps."""
        self._write(num_steps)
        [block] = self._read()
        return Block(**block)

    def close(self) -> None:
        """Ends the process."""
        self._write(0)
        self._process.wait(timeout=60)

    def _write(self, num_steps: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()

    def _read(self) -> list[dict]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}")
        return json.loads(line)


def start(folder: Path, case: str, lengths: str, settings: Sequence[str]) -> list[Contestant]:
    """Starts all contestants, interlace first."""
    task = [str(folder), lengths]
    found = [Contestant(OURS, "_step_interlace.py", [*task, *SETTINGS[case], *settings])]
    if importlib.util.find_spec("trl"):
        for name, *arguments in ON_ONE_CORE if case == "one-core" else ON_TWO_CORES:
            found.append(Contestant(name, "_step_trl.py", [*task, *arguments]))
    return found


def measure(case: str, lengths: str, settings: Sequence[str], rounds: int) -> list[Row]:
    """Measures all contestants in turns, after one unmeasured round."""
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder))
        contestants = start(Path(folder), case, lengths, settings)
        for number in range(rounds + 1):
            for contestant in contestants:
                block = contestant.turn(STEPS_A_TURN.get(contestant.name, 1))
                if number:
                    contestant.blocks.append(block)
                settle()
        for contestant in contestants:
            contestant.close()
    return [row(case, lengths, contestants[0], contestant) for contestant in contestants]


def settle() -> None:
    """Waits until no contestant computes: one that generates ahead continues until its gate is closed."""
    before = -1.0
    while (now := tree_cpu_s()) - before > 0.05:
        before = now
        time.sleep(0.3)


def row(case: str, lengths: str, ours: Contestant, other: Contestant) -> Row:
    """Returns a row from the turns of both."""
    pairs = list(zip(ours.blocks, other.blocks, strict=True))
    wall = [(a.tokens / a.wall_s) / (b.tokens / b.wall_s) for a, b in pairs]
    cpu = [(a.tokens / a.cpu_s) / (b.tokens / b.cpu_s) for a, b in pairs]
    return Row(
        case=case,
        lengths=lengths,
        contestant=other.name,
        step_s=statistics.median(block.wall_s / block.steps for block in other.blocks),
        tokens_per_s=statistics.median(block.tokens / block.wall_s for block in other.blocks),
        tokens_per_cpu_s=statistics.median(block.tokens / block.cpu_s for block in other.blocks),
        wall_ratio=statistics.median(wall),
        wall_ratio_range=(min(wall), max(wall)),
        cpu_ratio=statistics.median(cpu),
        cpu_ratio_range=(min(cpu), max(cpu)),
        bins={name: sum(block.bins[name] for block in other.blocks) for name in other.blocks[0].bins},
    )


def show(rows: Sequence[Row]) -> None:
    """Prints the table, and interlace's seconds by activity."""
    console = Console(width=120)
    heads = f"{'case':14}{'lengths':10}{'contestant':18}{'s/step':>8}{'tokens/s':>10}{'/CPU s':>8}"
    print(heads + "   interlace by it: wall, CPU")
    for item in rows:
        figures = f"{item.step_s:8.2f}{item.tokens_per_s:10.0f}{item.tokens_per_cpu_s:8.0f}"
        ratios = (
            ""
            if item.contestant == OURS
            else (
                f"   {item.wall_ratio:.2f} ({item.wall_ratio_range[0]:.2f}-{item.wall_ratio_range[1]:.2f}),"
                f" {item.cpu_ratio:.2f} ({item.cpu_ratio_range[0]:.2f}-{item.cpu_ratio_range[1]:.2f})"
            )
        )
        print(f"{item.case:14}{item.lengths:10}{item.contestant:18}{figures}{ratios}")
    for item in rows:
        if item.contestant == OURS:
            console.print(f"{item.contestant}, {item.case}, {item.lengths}")
            console.print(goodput_table(Ledger(seconds=item.bins)))


def main() -> None:
    """Runs the requested cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=tuple(SETTINGS), default=None, help="without it all")
    parser.add_argument("--lengths", choices=("uniform", "longtail"), default=None, help="without it both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of interlace's recipe")
    parser.add_argument("--json", type=Path, default=None, help="also write the rows there")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for case in (arguments.case,) if arguments.case else SETTINGS:
        for lengths in (arguments.lengths,) if arguments.lengths else ("uniform", "longtail"):
            rows += measure(case, lengths, arguments.set, arguments.rounds)
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(item) for item in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
