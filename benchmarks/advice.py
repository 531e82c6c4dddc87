"""Savings that `interlace advise` predicts against those that the suggested settings have in real runs.

    python benchmarks/advice.py [--recipes quickstart longtail] [--steps 24] [--rounds 2] [--write]

Each recipe trains once; the suggestions for that run are written with their hash before anything else runs. Then the
recipe and each suggestion train in turn, for several rounds, so that slow drift of the machine meets both.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from _page import write_table

from interlace.forecast.advice import Advice, advise
from interlace.observe.jsonl import to_line
from interlace.observe.run_folder import RunFolder

SKIPPED = 4
"""Steps that fill the pipeline and warm up caches; not counted."""
EXTRA = ("warmup.steps=20", "warmup.until=null", "evaluation.num_prompts=8")


def train(root: Path, name: str, recipe: str, settings: Sequence[str]) -> RunFolder:
    """Trains a recipe into root/runs/name, in a separate process."""
    words = [sys.executable, "-m", "interlace", "train", recipe, *settings, "--name", name, "--quiet"]
    subprocess.run(words, check=True, cwd=root)
    return RunFolder(path=root / "runs" / name)


def step_s(folder: RunFolder) -> float:
    """Returns the median seconds of a step, without the first ones."""
    rows = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    return median(row["timing_s/step"] for row in rows[SKIPPED:])


def compare(root: Path, recipe: str, settings: Sequence[str], rounds: int) -> tuple[Advice, list[list[float]]]:
    """Returns the suggestions, and seconds of a step of the recipe and of each suggestion in every round."""
    found = advise(train(root, f"{recipe}-first", recipe, settings))
    text = to_line(found.row())
    print(f"{recipe}: predicted before the runs, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}: {text}")
    kinds = [[], *([each.setting] for each in found.suggestions)]
    seconds: list[list[float]] = [[] for _ in kinds]
    for number in range(rounds):
        for place, extra in enumerate(kinds):
            folder = train(root, f"{recipe}-{number}-{place}", recipe, [*settings, *extra])
            seconds[place].append(step_s(folder))
            print(f"{recipe} {extra} round {number}: {seconds[place][-1]:.3f} s", flush=True)
    return found, seconds


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "longtail"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="into docs/planner.md")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    heads = ("recipe", "suggested", "predicted saving", "measured saving", "rounds")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in given.recipes:
            settings = [f"steps={given.steps}", *EXTRA]
            found, seconds = compare(Path(folder), recipe, settings, given.rounds)
            rows.append({"recipe": recipe, "predicted": found.row(), "step_s": seconds})
            if not found.suggestions:
                lines.append(f"| `{recipe}` | none of {found.num_tried} settings | | | |")
            for each, measured in zip(found.suggestions, seconds[1:], strict=True):
                savings = [1 - now / before for now, before in zip(measured, seconds[0], strict=True)]
                shown = ", ".join(f"{saving:+.0%}" for saving in savings)
                lines.append(
                    f"| `{recipe}` | `{each.setting}` | {each.saving:.0%} | {median(savings):+.0%} | {shown} |"
                )
    print("\n".join(lines))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if given.write:
        write_table(Path(__file__).parent.parent / "docs" / "planner.md", "advice", "\n".join(lines))


if __name__ == "__main__":
    main()
