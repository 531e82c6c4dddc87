"""Runs what each algorithm's page names under "Seen", and writes what came of it there and into README.md.

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
    """One algorithm. Its page says by which command."""
    page = HERE / f"{name}.md"
    text = page.read_text()
    seen = re.search(r"^`interlace (train .*?)` on one CPU core", text, re.MULTILINE)
    if seen is None:
        raise ValueError(f"{page} does not say by which command its figures are seen")
    run = f"algorithm-{name}"
    words = [*shlex.split(seen[1]), "--name", run, "--overwrite", "--quiet"]
    subprocess.run([sys.executable, "-c", "from interlace.cli.main import app; app()", *words], check=True)
    told = RunData.read(RunFolder(path=Path("runs") / run))
    rewards, size = told.values("reward/mean"), len(told.rows) // PARTS
    means = [f"{fmean(rewards[part * size : (part + 1) * size]):.2f}" for part in range(PARTS)]
    greedy, sampled = (told.curve(f"eval/accuracy_{kind}") for kind in ("greedy", "sampled"))
    accuracy = (
        f"greedy {greedy[0][1]:.3f} before, {greedy[-1][1]:.3f} after; "
        f"at temperature 1 {sampled[0][1]:.3f} before, {sampled[-1][1]:.3f} after."
    )
    text = with_line(text, "| mean reward |", f"{' | '.join(means)} |")
    page.write_text(with_line(text, "Held-out accuracy:", accuracy))
    overview = HERE / "README.md"
    ends = f"{greedy[-1][1]:.3f} | {sampled[-1][1]:.3f} |"
    head, title, tail = overview.read_text().partition("## Seen on the quick start")
    overview.write_text(head + title + with_line(tail, f"| [{name}]({name}.md) |", ends))
    print(name, ends, flush=True)


def with_line(text: str, start: str, rest: str) -> str:
    """The line that starts so, ended otherwise."""
    lines = text.splitlines()
    [place] = [number for number, line in enumerate(lines) if line.startswith(start)]
    lines[place] = f"{start} {rest}"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for each in sys.argv[1:] or algorithm_names():
        measure(each)
