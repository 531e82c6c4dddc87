"""Learning curves of shipped recipes over several seeds: one small SVG file per recipe for docs/gallery.md.

    python benchmarks/recipe_curves.py [--recipes quickstart sft ...] [--seeds 0 1 2] [--runs FOLDER] [--read-only]
        [--set KEY=VALUE ...] [--write docs/gallery.md] [--json FILE]

A seed also initialises the model. Each run uses one thread. A run whose folder is complete is read, not repeated.
--write draws the recipes that have three complete runs into images/curves/ next to the page, and lists all pictures of
that folder in the page.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import agent_recipes
import yaml
from _page import make_picture, write_table
from recipe_seeds import TEACHERS, teacher_setting

from interlace.core.errors import UserError
from interlace.forecast.plan_report import Plot, nice_ticks
from interlace.observe.jsonl import read_whole_rows
from interlace.observe.report.panels import RUN_COLOURS
from interlace.observe.run_folder import RunFolder

NAME = "benchmarks/recipe_curves.py"
FOLDER = Path("images") / "curves"
NUM_RUNS = 3
"""Runs that a picture needs."""

Curve = dict[int, float]
"""Step -> value."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The measure of a recipe's curve."""

    metric: str = "eval/accuracy_sampled"
    name: str = "held-out accuracy, sampled"
    eval_every: int | None = None
    """Steps between two evaluations; None takes the recipe's setting."""
    scale: float = 1.0
    """Factor of the metric."""
    recipe: str = ""
    """Recipe to train, if the curve has another name."""
    settings: tuple[str, ...] = ()
    """Changes of the recipe."""
    window: int = 1
    """Steps of which each value of the curve is the mean."""


ROWS = {"metric": "eval/row_accuracy", "name": "right held-out completions"}
PAIRS = {"metric": "eval/accuracy", "name": "held-out pairs in order"}
ROBOT = {"metric": "eval/accuracy_greedy", "name": "held-out success, greedy"}
EPISODES = {
    "metric": "env/success", "name": "training success, 3-step mean", "window": 3,
    "settings": ("task.starts.heldout_size=0",),
}  # fmt: skip
MEASURES = {
    "quickstart": Measure(eval_every=6),
    "quickstart-lora": Measure(
        recipe="quickstart", settings=("actor.lora.rank=16", "optimizer.lr=3e-3", "steps=30"), eval_every=3
    ),
    "logic": Measure(eval_every=6),
    "reasoning": Measure(eval_every=15),
    "code": Measure(eval_every=9),
    "calculator": Measure(),
    "second_guess": Measure(),
    "react": Measure(),
    "program": Measure(),
    "robot": Measure(**ROBOT, eval_every=20),
    "robot-pendulum": Measure(metric="env/return", name="training return, 5-step mean", scale=10.0, window=5),
    "robot-cartpole": Measure(
        metric="env/return", name="training return, 3-step mean", scale=100.0, window=3, settings=("epochs=10",)
    ),
    "robot-iql": Measure(**EPISODES),
    "robot-awr": Measure(**EPISODES),
    "robot-dagger": Measure(**EPISODES),
    "clone": Measure(**ROBOT, eval_every=3),
    "robot-world-model": Measure(**ROBOT, eval_every=11),
    "sft": Measure(**ROWS, eval_every=40),
    "dpo": Measure(**PAIRS, eval_every=15),
    "reward-model": Measure(**PAIRS, eval_every=15),
    "distill": Measure(eval_every=20),
    "smollm2": Measure(metric="reward/mean", name="training accuracy, 5-step mean", window=5),
    "smollm2-lora": Measure(metric="reward/mean", name="training accuracy, 5-step mean", window=5),
    "smollm2-distill": Measure(eval_every=10),
}


def train(recipe: str, seed: int, runs: Path, changes: list[str]) -> None:
    """Trains one recipe with one seed, if its run is not complete."""
    if read_curve(recipe, seed, runs):
        return
    measure = MEASURES[recipe]
    every = [f"eval_every={measure.eval_every}"] if measure.eval_every else []
    settings = ["--quiet", f"model.cache_dir={runs / 'cache'}", *measure.settings, *every, *changes]
    try:
        if recipe in TEACHERS:
            train(TEACHERS[recipe], seed, runs, changes)
            settings.append(teacher_setting(runs / "runs" / f"{TEACHERS[recipe]}-{seed}"))
        name = f"{recipe}-{seed}"
        agent_recipes.run(measure.recipe or recipe, seed, runs, settings, name=name, variables={"OMP_NUM_THREADS": "1"})
    except (subprocess.CalledProcessError, UserError) as error:  # the other runs do not depend on it
        print(f"{recipe}-{seed} failed: {error}", file=sys.stderr)


def read_curve(recipe: str, seed: int, runs: Path) -> Curve:
    """Returns the curve of a run; empty if the run is not complete."""
    folder, measure = RunFolder(path=runs / "runs" / f"{recipe}-{seed}"), MEASURES[recipe]
    if not folder.config.exists():
        return {}
    asked = yaml.safe_load(folder.config.read_text(encoding="utf-8"))["steps"]
    path = folder.evaluations if measure.metric.startswith("eval/") else folder.metrics
    rows = read_whole_rows(path) if path.exists() else []
    found = {
        row["step"]: row[measure.metric] * measure.scale
        for row in rows
        if measure.metric in row  # in some steps no episode ends
    }
    if not found or max(found) != asked:
        return {}
    steps, size = list(found), measure.window
    return {
        step: statistics.fmean(found[each] for each in steps[max(0, at - size + 1) : at + 1])
        for at, step in enumerate(steps)
        if at + 1 >= min(size, len(steps))
    }


def draw_curves(recipe: str, curves: dict[int, Curve]) -> str:
    """Draws the curves of a recipe, by seed."""
    measure = MEASURES[recipe]
    seeds = f"seeds {', '.join(map(str, curves))}"
    steps = [step for curve in curves.values() for step in curve]
    values = [value for curve in curves.values() for value in curve.values()]
    low = min(0.0, *values)
    ticks = nice_ticks(low, max(1.0 if low == 0.0 else 0.0, *values), 4)
    plot = Plot(width=320, height=190)
    x, y = plot.x_scale(0, max(steps)), plot.y_scale(ticks[0], ticks[-1])
    plot.grid(x, y, [tick for tick in nice_ticks(0, max(steps), 4) if tick <= max(steps)], ticks)
    for place, curve in enumerate(curves.values()):
        plot.path([(x(step), y(value)) for step, value in curve.items()], RUN_COLOURS[place % len(RUN_COLOURS)])
    for place, seed in enumerate(curves):
        right = plot.width - 14 - 26 * (len(curves) - 1 - place)
        plot.text(right, plot.height - 4, str(seed), "end")
        plot.dot(right - 11, plot.height - 7.5, RUN_COLOURS[place % len(RUN_COLOURS)], "")
    plot.text(plot.width - 14 - 26 * len(curves), plot.height - 4, "seed", "end")
    plot.x_title("step")
    plot.text(plot.left, 9, f"{recipe}: {measure.name}", "start")
    first, last = [[curve[end(curve)] for curve in curves.values()] for end in (min, max)]
    ends = f"{_format_range(first)} at the first step, {_format_range(last)} at the last"
    name = f"{recipe}: {measure.name}, by step, {seeds}; {ends}"
    rules = (
        "text{font:11px sans-serif;fill:#667085}.rule{stroke:#8884}.axis{stroke:#667085}"
        ".curve{fill:none;stroke-width:1.6}"
    )
    return make_picture(plot.render(name), rules, f'width="{plot.width}" height="{plot.height}"')


def _format_range(values: list[float]) -> str:
    low, high = (f"{value:.0f}" if abs(value) >= 10 else f"{value:.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def write_page(page: Path, drawn: dict[str, dict[int, Curve]]) -> None:
    """Writes the pictures of `drawn`, and lists all pictures of the folder in the page."""
    folder = page.parent / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for recipe, curves in drawn.items():
        if len(curves) >= NUM_RUNS:
            (folder / f"{recipe}.svg").write_text(draw_curves(recipe, curves) + "\n", encoding="utf-8")
    pictures = []
    for recipe in MEASURES:
        path = folder / f"{recipe}.svg"
        if path.exists():
            text = path.read_text(encoding="utf-8").partition('aria-label="')[2].partition('"')[0]
            text = text.replace(", by step", "").replace(", seeds 0, 1, 2;", ",")
            text = text.replace(" at the first step, ", ", then ").removesuffix(" at the last")
            pictures.append(f"![{text}]({FOLDER.as_posix()}/{recipe}.svg)")
    write_table(page, NAME, "\n".join(pictures))


def main() -> None:
    """Trains, prints the ends of the curves, and draws them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "recipe_curves")
    parser.add_argument("--read-only", action="store_true", help="train nothing, read the complete runs")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to each recipe")
    parser.add_argument("--write", type=Path, help="page that lists the pictures")
    parser.add_argument("--json", type=Path, help="also write the curves there, by recipe and seed")
    given = parser.parse_args()
    runs = given.runs.absolute()
    for recipe in given.recipes if not given.read_only else ():
        for seed in given.seeds:
            train(recipe, seed, runs, given.set)
    found = {
        recipe: {seed: curve for seed in given.seeds if (curve := read_curve(recipe, seed, runs))}
        for recipe in given.recipes
    }
    for recipe, curves in found.items():
        ends = ", ".join(f"{curve[min(curve)]:.2f} -> {curve[max(curve)]:.2f}" for curve in curves.values())
        print(f"{recipe}: {ends or 'no complete run'}")
    if given.json:
        given.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if given.write:
        write_page(given.write, found)


if __name__ == "__main__":
    main()
