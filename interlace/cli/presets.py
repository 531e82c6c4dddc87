"""`interlace presets`: the ways of running a flow."""

from typing import Annotated, Optional

import typer
import yaml
from rich.console import Console

from interlace.cli.listing import listing
from interlace.schedule.presets import load_schedule, preset_names, preset_path


def presets(
    name: Annotated[
        Optional[str],  # noqa: UP045  # typer reads it
        typer.Argument(help="One of them, or the path of your own YAML file: every field as it will be."),
    ] = None,
) -> None:
    """List the shipped schedules, or show one whole. `schedule=NAME` picks one, `schedule.FIELD=VALUE` changes it."""
    if name is None:
        Console().print(listing([preset_path(preset) for preset in preset_names()]))
        return
    fields = load_schedule(name).model_dump(mode="json")
    print(yaml.safe_dump(fields, sort_keys=False, default_flow_style=None), end="")
