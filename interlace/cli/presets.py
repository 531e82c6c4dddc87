"""`interlace presets`: lists and explains the shipped schedules."""

import textwrap
from typing import Annotated, Optional

import typer
from rich.console import Console

from interlace.cli.explain import explanation
from interlace.cli.recipes import listing
from interlace.core.errors import UserError
from interlace.core.yaml_text import to_yaml
from interlace.schedule.presets import load_schedule, preset_names, preset_path


def presets(
    name: Annotated[
        Optional[str],  # noqa: UP045  # typer reads it
        typer.Argument(help="A schedule or the path of a YAML file: prints every field."),
    ] = None,
    explain: Annotated[
        Optional[str],  # noqa: UP045  # typer reads it
        typer.Option(
            metavar="WORD",
            help="Explain a field, a value, a preset, or another system's word for one, with its unit.",
        ),
    ] = None,
) -> None:
    """List the shipped schedules, or show one whole. `schedule=NAME` picks one, `schedule.FIELD=VALUE` changes it."""
    if name is not None and explain is not None:
        raise UserError("NAME and --explain: give one of them, a preset is explained by --explain NAME.")
    if explain is not None:
        print("\n".join(_wrap_line(line, Console().width) for line in explanation(explain).splitlines()))
    elif name is None:
        Console().print(listing([preset_path(preset) for preset in preset_names()]))
    else:
        fields = load_schedule(name).model_dump(mode="json")
        print(to_yaml(fields, flow=None), end="")


def _wrap_line(line: str, width: int) -> str:
    """Wraps a line to the terminal's width; continuation lines are indented a step further."""
    indent = " " * (len(line) - len(line.lstrip()) + 2) if line.startswith(" ") else ""
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
