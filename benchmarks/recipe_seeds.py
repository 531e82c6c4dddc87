"""Shipped recipes on several seeds and instruction sets: the held-out measure before and after training.

    python benchmarks/recipe_seeds.py [--recipes quickstart calculator ...] [--seeds 0 1 2 3 4] [--runs FOLDER]
        [--read-only] [--json FILE] [--write docs/quickstart-results.md]

Rounding differs between instruction sets, so a recipe that learns on one can fail on another. Each run uses one thread.
A run whose folder is complete is read, not repeated, so the command continues after an interruption. A cell of the page
without a run in FOLDER stays as it is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import agent_recipes
import torch
from _page import write_table

from interlace.observe.run_folder import RunFolder
from interlace.run.best import choose_checkpoint

NAME = "benchmarks/recipe_seeds.py"
INSTRUCTION_SETS = {"avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "machine": {}}
TEACHERS = {"distill": "sft", "smollm2-distill": "smollm2"}
"""Recipe -> the recipe whose last checkpoint it takes as `reference.model`, from the run of the same seed."""
MEASURES = {"sft": "eval/loss", "dpo": "eval/accuracy", "reward-model": "eval/accuracy"}
RECIPES = (
    *("quickstart", "code", "logic", "reasoning", "second_guess", "calculator", "react", "program"),
    *("sft", "dpo", "reward-model", "distill"),
)
SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Outcome:
    """The measure on the held-out rows before the first step and after the last, for one run."""

    before: float
    after: float


def train(recipe: str, seed: int, instruction_set: str, runs: Path) -> None:
    """Trains one recipe with one seed, which also initialises the model, if its run is not complete."""
    name = run_name(recipe, seed, instruction_set)
    if read_outcome(recipe, seed, instruction_set, runs):
        return
    settings = ["--quiet", f"model.cache_dir={runs / 'cache' / instruction_set}"]
    if recipe in TEACHERS:
        train(TEACHERS[recipe], seed, instruction_set, runs)
        settings.append(teacher_setting(runs / "runs" / run_name(TEACHERS[recipe], seed, instruction_set)))
    variables = {"OMP_NUM_THREADS": "1"} | INSTRUCTION_SETS[instruction_set]
    try:
        agent_recipes.run(recipe, seed, runs, settings, name=name, variables=variables)
    except subprocess.CalledProcessError as error:  # the other runs do not depend on it
        print(f"{name} ended with exit status {error.returncode}", file=sys.stderr)


def teacher_setting(folder: Path) -> str:
    """Returns the setting that takes the newest checkpoint of a run as the teacher. folder: of the run."""
    return f"reference.model={choose_checkpoint(RunFolder(path=folder), None, 'newest').resolve()}"


def run_name(recipe: str, seed: int, instruction_set: str) -> str:
    """Returns the name of a run, which is also its folder."""
    return f"{recipe}-{seed}-{instruction_set}"


def read_outcome(recipe: str, seed: int, instruction_set: str, runs: Path) -> Outcome | None:
    """Returns the outcome of a complete run, and None if there is none."""
    folder = runs / "runs" / run_name(recipe, seed, instruction_set)
    path = folder / "evaluations.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    measure = MEASURES.get(recipe, "eval/accuracy_sampled")
    complete = len(rows) > 1 and len((folder / "metrics.jsonl").read_text().splitlines()) == rows[-1]["step"]
    return Outcome(rows[0][measure], rows[-1][measure]) if complete else None


Cells = dict[tuple[str, str], list[str]]
"""(recipe, instruction set) -> the cell of each seed."""


def read_cells(page: Path) -> Cells:
    """Reads the table of a page."""
    table = page.read_text(encoding="utf-8").partition(f"<!-- {NAME} -->")[2].partition(f"<!-- /{NAME} -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {(row[0].strip("`"), row[2]): row[3:] for row in rows}


def format_table(recipes: list[str], seeds: list[int], runs: Path, kept: Cells) -> str:
    """Returns a Markdown table with one row for each recipe and instruction set, and one column for each seed.

    kept: cells to use if there is no run. Rows of an instruction set that this machine lacks stay.
    """
    head = "| recipe | measure | instruction set | " + " | ".join(f"seed {seed}" for seed in seeds) + " |"
    rows = [head, "|---" * (len(seeds) + 3) + "|"]
    names = {torch.backends.cpu.get_cpu_capability(): "machine", "AVX2": "avx2"}
    for recipe in recipes:
        measure = MEASURES.get(recipe, "eval/accuracy_sampled").removeprefix("eval/")
        for label in sorted({*names, *(label for name, label in kept if name == recipe)}):
            instruction_set = names.get(label)
            found = [read_outcome(recipe, seed, instruction_set, runs) if instruction_set else None for seed in seeds]
            old = dict(enumerate(kept.get((recipe, label), [])))
            cells = [
                f"{row.before:.2f} -> {row.after:.2f}" if row else old.get(seed, "")
                for seed, row in zip(seeds, found, strict=True)
            ]
            rows.append(f"| `{recipe}` | {measure} | {label} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Trains, then prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "recipe_seeds")
    parser.add_argument("--read-only", action="store_true", help="train nothing, read the complete runs")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    parser.add_argument("--json", type=Path, help="also write the outcomes there, by run; null without a complete run")
    given = parser.parse_args()
    for recipe in given.recipes if not given.read_only else ():
        for seed in given.seeds:
            for instruction_set in INSTRUCTION_SETS:
                train(recipe, seed, instruction_set, given.runs)
    print(format_table(given.recipes, given.seeds, given.runs, {}))
    if given.json:
        keys = [(recipe, seed, name) for recipe in given.recipes for seed in given.seeds for name in INSTRUCTION_SETS]
        found = {run_name(*key): read_outcome(*key, given.runs) for key in keys}
        rows = {name: asdict(outcome) if outcome else None for name, outcome in found.items()}
        given.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    if given.write:  # the page has all recipes and seeds
        write_table(given.write, NAME, format_table(list(RECIPES), list(SEEDS), given.runs, read_cells(given.write)))


if __name__ == "__main__":
    main()
