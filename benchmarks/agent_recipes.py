"""Held-out accuracy of recipes before and after training, by seed. By default the recipes of agents.

    python benchmarks/agent_recipes.py [--recipes calculator react ...] [--seeds 0 1 2] [--runs FOLDER] [--read-only]
        [--write docs/agents.md] [--json curves.json] [--set KEY=VALUE ...]

Each run takes some minutes on two idle cores, mostly for the warm-up, which is cached. --read-only reads existing runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from _page import write_table

RECIPES = ("calculator", "second_guess", "react", "program")
METRICS = {"sft": "eval/row_accuracy", "dpo": "eval/accuracy", "reward-model": "eval/accuracy"}
"""Metrics of recipes that train on given rows; for others it is the accuracy at temperature 1."""


def run(
    recipe: str,
    seed: int,
    runs: Path,
    changes: list[str],
    *,
    name: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Trains one recipe from one seed, which also initialises the model. variables: added to the environment."""
    settings = [f"seed={seed}", f"model.seed={seed}", *changes]
    command = ["train", recipe, "--name", name or f"{recipe}-{seed}", "--overwrite", *settings]
    runs.mkdir(parents=True, exist_ok=True)
    environment = os.environ | (variables or {})
    subprocess.run([sys.executable, "-m", "interlace", *command], check=True, cwd=runs, env=environment)


def curve(recipe: str, seed: int, runs: Path) -> dict[int, float]:
    """Returns the accuracy by step."""
    lines = (runs / "runs" / f"{recipe}-{seed}" / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row[METRICS.get(recipe, "eval/accuracy_sampled")] for row in map(json.loads, lines)}


def curves_of(recipe: str, seeds: list[int], runs: Path) -> dict[int, dict[int, float]]:
    """Returns the curves of the existing runs, by seed."""
    return {seed: curve(recipe, seed, runs) for seed in seeds if (runs / "runs" / f"{recipe}-{seed}").is_dir()}


def table(recipes: list[str], seeds: list[int], runs: Path) -> str:
    """Returns a table with one row per recipe: the accuracy of each seed before the first step and after the last."""
    lines = ["| recipe | steps | seeds | before | after |", "|---|---|---|---|---|"]
    for recipe in recipes:
        curves = curves_of(recipe, seeds, runs)
        steps = ", ".join(map(str, sorted({max(found) for found in curves.values()})))
        before = ", ".join(f"{found[min(found)]:.2f}" for found in curves.values())
        after = ", ".join(f"{found[max(found)]:.2f}" for found in curves.values())
        lines.append(f"| `{recipe}` | {steps} | {', '.join(map(str, curves))} | {before} | {after} |")
    return "\n".join(lines)


def main() -> None:
    """Trains, then prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "agent_recipes")
    parser.add_argument("--read-only", action="store_true", help="train nothing, read the runs that are there")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    parser.add_argument("--json", type=Path, help="also write the curves there")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to each recipe")
    given = parser.parse_args()
    for recipe in given.recipes if not given.read_only else ():
        for seed in given.seeds:
            run(recipe, seed, given.runs, given.set)
    text = table(given.recipes, given.seeds, given.runs)
    print(text)
    if given.json:
        found = {recipe: curves_of(recipe, given.seeds, given.runs) for recipe in given.recipes}
        given.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if given.write:
        write_table(given.write, "benchmarks/agent_recipes.py", text)


if __name__ == "__main__":
    main()
