"""`interlace recipes`: lists the shipped recipes; also makes the table of shipped YAML files."""

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text


def recipes() -> None:
    """List the shipped recipes. Your own is a YAML file: `interlace train path/to/recipe.yaml`."""
    from interlace.run.recipe.load import recipe_names, recipe_path

    Console().print(listing([recipe_path(name) for name in recipe_names()]))


def listing(paths: Sequence[Path]) -> Table:
    """Returns a table of YAML files, one row per file: its name and the first sentence of its comment."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for path in paths:
        table.add_row(Text(path.stem), Text(_first_sentence(path)))
    return table


def _first_sentence(path: Path) -> str:
    """Returns the first sentence of the comment with which a file begins; an empty text if there is no comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    sentence = re.match(r".*?\.(?=\s|$)", comment)
    return sentence[0] if sentence else comment
