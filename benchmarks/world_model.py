"""Savings by imagined rollouts: a recipe with and without them at equal real episodes, and SAC at equal real steps.

`reach` is the recipe `robot-world-model` (state vectors), `pendulum` is `robot-world-model-pixels` (pictures). With and
without imagined rollouts, a run has the same number of real episodes per step and makes the same number of updates.
With them, the model that is fitted while the policy learns also runs each start once. SAC learns from state vectors,
with the same simulator, without demonstrations and without a world model. The score is success for `reach` and the
scaled return for `pendulum`, of real, sampled training episodes, as a mean over ten steps; a step of SAC has as many
real episodes. `steps to` is the number of real simulator steps until such a mean first reaches a score. The second
table is the model's error on a step's real episodes before it is trained on them, by imagined chunks, in units of a
chunk's typical change of an observation.

    python benchmarks/world_model.py [--task reach] [--seeds 0 1] [--steps 60] [--variants with without sac]
        [--write docs/robots.md] [--json world_model.json]
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _page import write_table

from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.robots.world_model.worker import HORIZONS
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train

BEGIN, END = "<!-- benchmarks/world_model.py -->", "<!-- end of world model -->"
WINDOW = 10
"""Steps in a mean of the score."""
SHARED = ("task.starts.heldout_size=0", "logging.loggers=[]", "logging.timeline=false", "eval_every=0")
NO_MODEL = ("task.starts.imagined_per_start=0", "episode.imagined=null", "world_model=null", "replay=null")
Line = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task, and the recipe and settings of each variant."""

    score: str
    """Metric of a step."""
    rates: tuple[float, ...]
    """Scores to reach."""
    variants: Mapping[str, tuple[str, ...]]
    """Name of a variant -> its recipe, then its settings."""


TASKS: Mapping[str, Task] = {
    "reach": Task(
        score="env/success",
        rates=(0.5, 0.6, 0.7, 0.8),
        variants={
            "with": ("robot-world-model", "prompts_per_step=64", "minibatches=4"),
            "without": ("robot-world-model", "prompts_per_step=32", "minibatches=4", *NO_MODEL),
            "sac": ("robot-sac-reach", "prompts_per_step=32"),
        },
    ),
    "pendulum": Task(
        score="env/return",
        rates=(-50.0, -40.0, -30.0, -20.0),
        variants={
            "with": ("robot-world-model-pixels",),
            "without": ("robot-world-model-pixels", "prompts_per_step=8", *NO_MODEL),
            "sac": (
                "robot-sac", "prompts_per_step=8", "episode.reward_scale=0.05",
                "episode.env.settings={tasks: [Pendulum-v1], horizon: 100, action_repeat: 2}",
            ),
        },
    ),
}  # fmt: skip


def run(task: Task, variant: str, seed: int, steps: int) -> tuple[list[Line], float]:
    """Trains. Returns the metrics of each step, and CPU seconds of this process and its simulators."""
    began_s = time.process_time()
    with tempfile.TemporaryDirectory() as root:
        name, *settings = task.variants[variant]
        recipe = load_recipe(name, [*SHARED, *settings, f"seed={seed}", f"steps={steps}"])
        folder = RunFolder.create(Path(root), "run")
        folder.write_config(recipe)
        train(recipe, folder, resume=False, progress=QuietProgress(), stop=StopSignal(lambda: None))
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return lines, time.process_time() - began_s + sum(line["env/seconds"] for line in lines)


def windows(lines: Sequence[Line], name: str) -> list[float]:
    """Returns means over ten steps each."""
    spans = [lines[first : first + WINDOW] for first in range(0, len(lines) - WINDOW + 1, WINDOW)]
    return [statistics.fmean([line[name] for line in span if name in line] or [math.nan]) for span in spans]


def steps_to(lines: Sequence[Line], score: str, rate: float) -> str:
    """Returns the real steps, in thousands, until the score over ten steps reaches a rate."""
    done = 0.0
    for place, line in enumerate(lines):
        done += line["env/steps"]
        last = [each[score] for each in lines[max(0, place + 1 - WINDOW) : place + 1]]
        if len(last) == WINDOW and statistics.fmean(last) >= rate:
            return f"{done / 1000:.1f}"
    return "-"


def tables(task: Task, found: Mapping[tuple[str, int], tuple[Sequence[Line], float]], steps: int) -> str:
    """Returns the score by real steps, and the model's error by horizon, as tables."""
    spans = [f"{first + 1}-{first + WINDOW}" for first in range(0, steps - WINDOW + 1, WINDOW)]
    rows = [
        "| imagined rollouts | seed | " + " | ".join(spans) + " | "
        + " | ".join(f"steps to {rate:g}".replace("0.", ".") for rate in task.rates) + " | real steps | CPU s |",
        "|---" * (len(spans) + len(task.rates) + 4) + "|",
    ]  # fmt: skip
    for (variant, seed), (lines, cpu_s) in found.items():
        success = [f"{share:.2f}".removeprefix("0") for share in windows(lines, task.score)]
        reached = [steps_to(lines, task.score, rate) for rate in task.rates]
        real = f"{sum(line['env/steps'] for line in lines) / 1000:.1f}"
        rows.append(f"| {variant} | {seed} | {' | '.join([*success, *reached, real])} | {cpu_s:.0f} |")
    rows += [
        "",
        "Steps in thousands. The model's error, by chunks imagined:",
        "",
        "| seed | chunks | " + " | ".join(spans) + " |",
        "|---" * (len(spans) + 2) + "|",
    ]
    for (variant, seed), (lines, _) in found.items():
        for horizon in HORIZONS if variant == "with" else ():
            errors = windows(lines, f"world_model/error_{horizon}")
            if all(map(math.isnan, errors)):
                continue  # no episode lasts that long
            rows.append(f"| {seed} | {horizon} | " + " | ".join(f"{error:.2f}" for error in errors) + " |")
    return "\n".join(rows)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="reach")
    parser.add_argument("--variants", nargs="+", choices=["with", "without", "sac"], default=["with", "without"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found, task = {}, TASKS[given.task]
    for seed in given.seeds:
        for variant in given.variants:
            found[variant, seed] = run(task, variant, seed, given.steps)
            print(f"{variant}, seed {seed}: {windows(found[variant, seed][0], task.score)}", flush=True)
    text = tables(task, found, given.steps)
    print(text)
    if given.json:
        kept = {f"{variant} {seed}": lines for (variant, seed), (lines, _) in found.items()}
        given.json.write_text(json.dumps(kept), encoding="utf-8")
    if given.write:
        own = "" if given.task == "reach" else f" --task {given.task}"
        write_table(given.write, f"benchmarks/world_model.py{own}", text)


if __name__ == "__main__":
    main()
