"""`interlace recipes`: lists the shipped recipes; also makes the table of shipped YAML files."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text


def recipes() -> None:
    """List the shipped recipes. Your own is a YAML file: `interlace train path/to/recipe.yaml`."""
    from interlace.run.recipe.load import recipe_names, recipe_path

    Console().print(listing([recipe_path(name) for name in recipe_names()]))


def listing(paths: Sequence[Path]) -> Table:
    """Returns a table of YAML files, one row per file: its name and its first comment line."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for path in paths:
        table.add_row(Text(path.stem), Text(_first_comment(path)))
    return table


def _first_comment(path: Path) -> str:
    """Returns the text of the first line if it is a comment, else an empty text."""
    with path.open(encoding="utf-8") as file:
        line = file.readline()
    return line.removeprefix("#").strip() if line.startswith("#") else ""
