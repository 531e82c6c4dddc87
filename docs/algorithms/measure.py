"""Runs the command on each algorithm's page for forty steps, and writes the held-out accuracy into README.md.

python docs/algorithms/measure.py [NAME ...]     # all algorithms, or some
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from interlace.algorithms import algorithm_names
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder

HERE = Path(__file__).parent
STEPS = 40
"""Steps of a run."""


def measure(name: str) -> None:
    """Runs one algorithm by the command on its page, and updates its row of the table."""
    page = HERE / f"{name}.md"
    command = re.search(r"^interlace (train quickstart .*)$", page.read_text(), re.MULTILINE)
    if command is None:
        raise ValueError(f"{page} does not contain a command")
    run = f"algorithm-{name}"
    words = [*shlex.split(command[1]), f"steps={STEPS}", "--name", run, "--overwrite", "--quiet"]
    subprocess.run([sys.executable, "-c", "from interlace.cli.main import app; app()", *words], check=True)
    data = RunData.read(RunFolder(path=Path("runs") / run))
    ends = [f"{data.curve(f'eval/accuracy_{kind}')[-1][1]:.3f}" for kind in ("greedy", "sampled")]
    overview = HERE / "README.md"
    head, title, tail = overview.read_text().partition("## Measured on the quick start")
    row = f"{' | '.join(ends)} |"
    overview.write_text(head + title + with_line(tail, f"| [{name}]({name}.md) |", row))
    print(name, row, flush=True)


def with_line(text: str, start: str, rest: str) -> str:
    """Replaces the rest of the only line that starts with `start`."""
    lines = text.splitlines()
    [index] = [number for number, line in enumerate(lines) if line.startswith(start)]
    lines[index] = f"{start} {rest}"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for each in sys.argv[1:] or algorithm_names():
        measure(each)
