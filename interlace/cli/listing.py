"""YAML files as a list: name, and the sentence that each opens with."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text


def listing(paths: Sequence[Path]) -> Table:
    """A row a file."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for path in paths:
        table.add_row(Text(path.stem), Text(_first_comment(path)))
    return table


def _first_comment(path: Path) -> str:
    """Its first line, where that is a comment."""
    with path.open(encoding="utf-8") as file:
        line = file.readline()
    return line.removeprefix("#").strip() if line.startswith("#") else ""
