"""Runs the command on each algorithm's page, and writes the figures into the page and README.md.

python docs/algorithms/measure.py [NAME ...]     # all algorithms, or some
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from interlace.algorithms import algorithm_names
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder

HERE = Path(__file__).parent
PARTS = 8
"""Columns of a page's table."""


def measure(name: str) -> None:
    """Runs one algorithm by the command on its page, and updates both tables."""
    page = HERE / f"{name}.md"
    text = page.read_text()
    command = re.search(r"^`interlace (train .*?)` on one CPU core", text, re.MULTILINE)
    if command is None:
        raise ValueError(f"{page} does not contain the command of its figures")
    run = f"algorithm-{name}"
    words = [*shlex.split(command[1]), "--name", run, "--overwrite", "--quiet"]
    subprocess.run([sys.executable, "-c", "from interlace.cli.main import app; app()", *words], check=True)
    data = RunData.read(RunFolder(path=Path("runs") / run))
    rewards, size = data.values("reward/mean"), len(data.rows) // PARTS
    means = [f"{fmean(rewards[part * size : (part + 1) * size]):.2f}" for part in range(PARTS)]
    greedy, sampled = (data.curve(f"eval/accuracy_{kind}") for kind in ("greedy", "sampled"))
    accuracy = (
        f"greedy {greedy[0][1]:.3f} before, {greedy[-1][1]:.3f} after; "
        f"at temperature 1 {sampled[0][1]:.3f} before, {sampled[-1][1]:.3f} after."
    )
    text = with_line(text, "| mean reward |", f"{' | '.join(means)} |")
    page.write_text(with_line(text, "Held-out accuracy:", accuracy))
    overview = HERE / "README.md"
    ends = f"{greedy[-1][1]:.3f} | {sampled[-1][1]:.3f} |"
    head, title, tail = overview.read_text().partition("## Measured on the quick start")
    overview.write_text(head + title + with_line(tail, f"| [{name}]({name}.md) |", ends))
    print(name, ends, flush=True)


def with_line(text: str, start: str, rest: str) -> str:
    """Replaces the rest of the only line that starts with `start`."""
    lines = text.splitlines()
    [index] = [number for number, line in enumerate(lines) if line.startswith(start)]
    lines[index] = f"{start} {rest}"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for each in sys.argv[1:] or algorithm_names():
        measure(each)
