"""Runs the quick start with each algorithm for forty steps, and writes the held-out accuracy into README.md.

The command is the one on the algorithm's page if it has other settings.

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
    run = f"algorithm-{name}"
    words = [
        *shlex.split(command[1] if command else f"train quickstart algorithm={name}"),
        f"steps={STEPS}",
        "--name",
        run,
        "--overwrite",
        "--quiet",
    ]
    subprocess.run([sys.executable, "-c", "from interlace.cli.main import app; app()", *words], check=True)
    data = RunData.read(RunFolder(path=Path("runs") / run))
    ends = [f"{data.curve(f'eval/accuracy_{kind}')[-1][1]:.3f}" for kind in ("greedy", "sampled")]
    overview = HERE / "README.md"
    overview.write_text(with_figures(overview.read_text(), name, ends))
    print(name, *ends, flush=True)


def with_figures(text: str, name: str, figures: list[str]) -> str:
    """Replaces the last cells of the row of an algorithm."""
    lines = text.splitlines()
    [index] = [number for number, line in enumerate(lines) if line.startswith(f"| [{name}]({name}.md) |")]
    cells = lines[index].removesuffix(" |").rsplit(" | ", len(figures))[0]  # may end in an empty cell
    lines[index] = " | ".join([cells, *figures]) + " |"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for each in sys.argv[1:] or algorithm_names():
        measure(each)
