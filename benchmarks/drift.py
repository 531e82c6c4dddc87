"""Real runs that change midway: `schedule=auto` against static schedules, by phases of each run.

    python benchmarks/drift.py [--parts lengths,tool,device] [--steps 80] [--schedules one-step-off,...] [--write]

Each part is the quick start on two cores, with the same seed under each schedule. lengths: it is rewarded for the
length of its answers, so that they grow from some tokens to the limit. tool: after half of the steps the reward, which
waits for a tool in two processes, takes four times as long. device: each engine is a server; after half of the steps a
core of the run disappears, the last engine is killed, and the other one continues. An only engine starts again on the
core that is left. Seconds are the runs' steps; the time of restarts under another schedule is reported separately.
--write puts the result of all parts into docs/planner.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from _drift_faults import NUM_CORES, remove_core
from _drift_rewards import LIMIT, SLOW_FILE
from _page import write_table

from interlace.core.types import TerminalEvent
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder

STATIC = ("verl-colocated", "one-step-off", "streamrl-async", "pipelinerl", "async-colocated", "areal")
AUTO = "{preset: auto, max_staleness: 4}"
CHANGE = "changing the schedule"
"""Prefix of the line that a run prints at each change, in place or with a restart."""
COMMON = (
    "reward.correct=0", f"sampling.max_new_tokens={LIMIT}", "eval_every=0", "checkpoint_every=0", "logging.loggers=[]",
    "evaluation={num_prompts: 1, samples_per_prompt: 0}",
)  # fmt: skip
STEADY = "optimizer={lr: 1e-9, schedule: constant}"
"""Learning rate with which lengths stay constant."""
TRAIN = "from interlace.cli.main import app; app()"
WIDTH = 118


@dataclass(frozen=True, kw_only=True)
class Part:
    """A change of a run, and the phases in which schedules are compared."""

    title: str
    phases: Sequence[str]
    settings: Sequence[str]
    code: str = TRAIN
    """Python code that runs the command line."""
    change: Callable[[int, Path], None] | None = None
    """Called with the run's process and folder after half of the steps."""
    left_out: Sequence[str] = ()
    """Static schedules that cannot run under the settings."""


def slow_tool(process: int, folder: Path) -> None:
    """Makes the tool of a run slow."""
    del process
    slow_file(folder).touch()


def slow_file(folder: Path) -> Path:
    """Returns the file of a run that makes its tool slow."""
    return folder.with_suffix(".slow")


def lose_device(process: int, folder: Path) -> None:
    """Takes a core and its engine from a run."""
    remove_core(process, RunFolder(path=folder).engines)


PARTS = {
    "lengths": Part(
        title="answers grow",
        phases=("quarter 1", "quarter 2", "quarter 3", "quarter 4"),
        settings=(
            "reward=_drift_rewards:longer", "reward.workers=0", "optimizer.lr=1e-3", f"cluster.devices=cpu:{NUM_CORES}",
        ),
    ),
    "tool": Part(
        title="the tool takes 4x",
        phases=("before", "after"),
        settings=(
            "reward=_drift_rewards:score_with_tool", "reward.workers=2", STEADY, f"cluster.devices=cpu:{NUM_CORES}",
        ),
        change=slow_tool,
    ),
    "device": Part(
        title="a core and its engine disappear",
        phases=("before", "after"),
        settings=(
            "reward=_drift_rewards:longer", "reward.workers=0", STEADY, "cluster.devices=cpu",
            "rollout={engine: interlace, max_running: 128, max_tokens: 8192, heartbeat_s: 0.5}",
        ),
        code="import _drift_faults; _drift_faults.train_with_servers()",
        change=lose_device,
        left_out=("async-colocated",),  # it keeps the cache of running sequences, which servers on shared devices lose
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run, by phases."""

    name: str
    tokens: Sequence[float]
    """Mean length of a response."""
    rates: Sequence[float]
    """Trained tokens per second of the whole run on all devices."""
    rate: float
    wall_s: float
    num_changes: int


def ran(part: Part, name: str, schedule: str, steps: int, root: Path) -> Ran:
    """Trains under a schedule in a separate process."""
    folder = root / "runs" / name
    words = ["train", "quickstart", *part.settings, *COMMON, f"schedule={schedule}", f"steps={steps}", "--name", name]
    start_s, said = time.monotonic(), list[str]()
    with subprocess.Popen(
        [sys.executable, "-c", part.code, *words],
        cwd=root, env=_environment(folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                if part.change and line.startswith(f"step {steps // 2}/"):
                    part.change(process.pid, folder)
        except BaseException:  # such as Ctrl-C: the run ends before its folder is removed
            process.terminate()
            process.communicate()
            raise
    if process.returncode:
        raise SystemExit(f"{part.title}: the run under {name} failed.\n{''.join(said[-40:])}")
    run, num_phases = RunData.read(RunFolder(path=folder)), len(part.phases)
    bounds = [place * steps // num_phases for place in range(num_phases + 1)]
    spans = [range(first + 1, last + 1) for first, last in pairwise(bounds)]
    return Ran(
        name=name,
        tokens=[fmean(row["response_length/mean"] for row in run.rows if row["step"] in span) for span in spans],
        rates=[_rate(run, span) for span in spans],
        rate=_rate(run, range(1, steps + 1)),
        wall_s=time.monotonic() - start_s,
        num_changes="".join(said).count(CHANGE),
    )


def _environment(folder: Path) -> dict[str, str]:
    """Returns an environment in which rewards can be imported. Threads that share a core do not wait in a loop."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, SLOW_FILE: str(slow_file(folder)), "OMP_WAIT_POLICY": "passive"}


def _rate(run: RunData, steps: range) -> float:
    """Returns the trained tokens per second of all devices, whose number may change."""
    trained = sum(
        each.num_tokens for each in run.transcripts if each.step in steps and each.event == TerminalEvent.TRAINED
    )
    return trained / sum(row["timing_s/step"] for row in run.rows if row["step"] in steps)


def summarize(found: Mapping[str, tuple[Ran, Sequence[Ran]]]) -> str:
    """Returns a table of the phases, and a paragraph for each part."""
    lines = ["| change | phase | best static schedule | tokens/s | `auto` |", "| --- | --- | --- | --- | --- |"]
    told = []
    for key, (auto, static) in found.items():
        part = PARTS[key]
        for place, phase in enumerate(part.phases):
            best = max(static, key=lambda each: each.rates[place])
            share = auto.rates[place] / best.rates[place]
            lines.append(f"| {part.title} | {phase} | `{best.name}` | {best.rates[place]:,.0f} | {share:.2f} |")
        told.append(textwrap.fill(_describe_run(part, auto, static), WIDTH, break_on_hyphens=False))
    return "\n".join(lines) + "\n\n" + "\n\n".join(told)


def _describe_run(part: Part, auto: Ran, static: Sequence[Ran]) -> str:
    best = max(static, key=lambda each: each.rate)
    others = ", ".join(f"`{each.name}` {each.rate:,.0f}" for each in static)
    return (
        f"{part.title.capitalize()}: `auto` trains {auto.rate:,.0f} tokens/s with {auto.num_changes} changes of the "
        f"schedule, {auto.rate / best.rate:.2f} times as many as the best static schedule ({others}). Its answers have "
        f"{auto.tokens[0]:.0f} tokens in the first phase and {auto.tokens[-1]:.0f} in the last one. With start and "
        f"profile `auto` took {auto.wall_s:.0f} s, `{best.name}` {best.wall_s:.0f}."
    )


def main() -> None:
    """Runs the comparison; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--schedules", default=",".join(STATIC))
    parser.add_argument("--write", action="store_true", help="into docs/planner.md")
    parser.add_argument("--json", type=Path, help="also write the runs there")
    args = parser.parse_args()
    keys = args.parts.split(",")
    if unknown := [key for key in keys if key not in PARTS]:
        parser.error(f"--parts: {unknown[0]!r} is unknown. Name {', '.join(PARTS)}.")
    if args.steps < (least := max(len(PARTS[key].phases) for key in keys)):
        parser.error(f"--steps {args.steps}: a run has {least} phases. Give {least} steps or more.")
    if args.write and set(keys) != set(PARTS):
        parser.error("--write needs all parts, because docs/planner.md has one table of them. Remove --parts.")
    found = dict[str, tuple[Ran, Sequence[Ran]]]()
    for key in keys:
        with tempfile.TemporaryDirectory() as root:
            static = []
            for name in (each for each in args.schedules.split(",") if each not in PARTS[key].left_out):
                static.append(ran(PARTS[key], name, name, args.steps, Path(root)))
                print(key, static[-1], flush=True)
            found[key] = ran(PARTS[key], "auto", AUTO, args.steps, Path(root)), static
            print(key, found[key][0], flush=True)
    table = summarize(found)
    print(table)
    if args.json:
        rows = [{"part": key, **asdict(each)} for key, (auto, static) in found.items() for each in (auto, *static)]
        args.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    if args.write:
        write_table(Path(__file__).parent.parent / "docs" / "planner.md", "drift here", table)


if __name__ == "__main__":
    main()
