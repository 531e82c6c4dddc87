"""Savings by imagined rollouts: a recipe with and without them at equal real episodes, and SAC at equal real steps.

`reach` is the recipe `robot-world-model` (state vectors), `pendulum` is `robot-world-model-pixels` (pictures). With and
without imagined rollouts, a run has the same number of real episodes per step and makes the same number of updates.
With them, the model that is fitted while the policy learns also runs each start once. SAC learns from state vectors,
with the same simulator, without demonstrations and without a world model. The score is success for `reach` and the
scaled return for `pendulum`, of real, sampled training episodes, as a mean over ten steps; a step of SAC has as many
real episodes.

    python benchmarks/world_model.py [--task reach] [--seeds 0 1] [--steps 60] [--variants with without sac]
        [--json world_model.json]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train

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
    variants: Mapping[str, tuple[str, ...]]
    """Name of a variant -> its recipe, then its settings."""


TASKS: Mapping[str, Task] = {
    "reach": Task(
        score="env/success",
        variants={
            "with": ("robot-world-model", "prompts_per_step=64", "minibatches=4"),
            "without": ("robot-world-model", "prompts_per_step=32", "minibatches=4", *NO_MODEL),
            "sac": ("robot-sac-reach", "prompts_per_step=32"),
        },
    ),
    "pendulum": Task(
        score="env/return",
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
    return [statistics.fmean(line[name] for line in span) for span in spans]


def format_table(task: Task, found: Mapping[tuple[str, int], tuple[Sequence[Line], float]], steps: int) -> str:
    """Returns the score of each variant and seed as a table, by tens of steps."""
    spans = [f"{first + 1}-{first + WINDOW}" for first in range(0, steps - WINDOW + 1, WINDOW)]
    rows = [
        "| imagined rollouts | seed | " + " | ".join(spans) + " | CPU s |",
        "|---" * (len(spans) + 3) + "|",
    ]
    for (variant, seed), (lines, cpu_s) in found.items():
        scores = [f"{score:.2f}".removeprefix("0") for score in windows(lines, task.score)]
        rows.append(f"| {variant} | {seed} | {' | '.join([*scores, f'{cpu_s:.0f}'])} |")
    return "\n".join(rows)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="reach")
    parser.add_argument("--variants", nargs="+", choices=["with", "without", "sac"], default=["with", "without"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found, task = {}, TASKS[given.task]
    for seed in given.seeds:
        for variant in given.variants:
            found[variant, seed] = run(task, variant, seed, given.steps)
            print(f"{variant}, seed {seed}: {windows(found[variant, seed][0], task.score)}", flush=True)
    print(format_table(task, found, given.steps))
    if given.json:
        kept = {f"{variant} {seed}": lines for (variant, seed), (lines, _) in found.items()}
        given.json.write_text(json.dumps(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
