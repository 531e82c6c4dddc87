"""Real run with growing answers: `schedule=auto` against static schedules, by phases of the run.

    python benchmarks/drift.py [--steps 80] [--schedules one-step-off,...] [--write]

The quick start is rewarded for the length of its answers, so that they grow from some tokens to the limit. Each run has
the same seed, and a cluster of two devices of this machine. Seconds are the runs' steps; the time of restarts under
another schedule is reported separately. --write puts the result into docs/planner.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from _page import write_table

from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder

LIMIT = 96
PHASES = 4
STATIC = ("verl-colocated", "one-step-off", "streamrl-async", "pipelinerl", "async-colocated", "areal")
AUTO = "{preset: auto, max_staleness: 4}"
CHANGE = "changing the schedule"
"""Prefix of the line that a run prints at each change, in place or with a restart."""


def longer(prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
    """Returns the length of a response as a share of the limit; each character is a token."""
    del prompt, answer, metadata
    return min(1.0, len(response) / LIMIT)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run, by phases."""

    name: str
    tokens: Sequence[float]
    """Mean length of a response."""
    rates: Sequence[float]
    """Trained tokens per second."""
    rate: float
    wall_s: float
    num_changes: int


def ran(name: str, schedule: str, steps: int, root: Path) -> Ran:
    """Trains under a schedule in a separate process."""
    settings = [
        f"schedule={schedule}", f"steps={steps}", "reward=drift:longer", "reward.workers=0", "reward.correct=0",
        f"sampling.max_new_tokens={LIMIT}", "eval_every=0", "checkpoint_every=0", "cluster.devices=cpu:2",
        "evaluation={num_prompts: 1, samples_per_prompt: 0}", "logging.loggers=[]", "optimizer.lr=1e-3",
    ]  # fmt: skip
    words = ["train", "quickstart", *settings, "--name", name]
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "from interlace.cli.main import app; app()", *words],
        cwd=root, env=_environment(), check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    run = RunData.read(RunFolder(path=root / "runs" / name))
    size = len(run.rows) // PHASES
    phases = [replace(run, rows=run.rows[place * size : (place + 1) * size]) for place in range(PHASES)]
    return Ran(
        name=name,
        tokens=[fmean(phase.values("response_length/mean")) for phase in phases],
        rates=[_rate(phase) for phase in phases],
        rate=_rate(run),
        wall_s=time.monotonic() - start_s,
        num_changes=done.stdout.count(CHANGE),
    )


def _environment() -> dict[str, str]:
    """Returns an environment in which the reward can be imported."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def _rate(run: RunData) -> float:
    """Returns the trained tokens per second of both devices."""
    return 2 * (run.time_mean("goodput/trained_tokens_per_device_s") or 0.0)


def summarize(auto: Ran, static: Sequence[Ran]) -> str:
    """Returns the comparison as a paragraph."""
    best = max(static, key=lambda each: each.rate)
    tops = [max(each.rates[place] for each in static) for place in range(PHASES)]
    shares = ", ".join(f"{rate / top:.2f}" for rate, top in zip(auto.rates, tops, strict=True))
    others = ", ".join(f"`{each.name}` {each.rate:,.0f}" for each in static)
    told = [
        f"Answers grow from {auto.tokens[0]:.0f} to {auto.tokens[-1]:.0f} tokens (means of the first and the last "
        f"quarter). `auto` trains {auto.rate:,.0f} tokens/s with {auto.num_changes} changes of the schedule, "
        f"{auto.rate / best.rate:.2f} times as many as the best static schedule: {others}. By quarter of the run, it "
        f"trains {shares} times as many as the best static schedule of that quarter.",
        f"With start and profile `auto` took {auto.wall_s:.0f} s, `{best.name}` {best.wall_s:.0f}.",
    ]
    return textwrap.fill(" ".join(told), 118)


def main() -> None:
    """Runs the comparison; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--schedules", default=",".join(STATIC))
    parser.add_argument("--write", action="store_true", help="into docs/planner.md")
    parser.add_argument("--json", type=Path, help="also write the runs there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        static = []
        for name in args.schedules.split(","):
            static.append(ran(name, name, args.steps, Path(root)))
            print(static[-1], flush=True)
        auto = ran("auto", AUTO, args.steps, Path(root))
    found = summarize(auto, static)
    print(found)
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in (auto, *static)]) + "\n", encoding="utf-8")
    if args.write:
        write_table(Path(__file__).parent.parent / "docs" / "planner.md", "drift here", found)


if __name__ == "__main__":
    main()
