"""`interlace scale`: changes the number of a run's engines during training."""

import re
from typing import Annotated

import typer
from rich.console import Console

from interlace.cli.engines import engines_folder, list_engines, send_command
from interlace.core.errors import UserError
from interlace.schedule.roles import role_named

_TARGET = re.compile(r"(?P<role>[^=]+)=(?P<number>-?\d+)")


def scale(
    run: Annotated[str, typer.Argument(help="Name of a run that trains now, or its folder.")],
    target: Annotated[str, typer.Argument(metavar="rollout=N", help="Number of engines that the run shall have.")],
) -> None:
    """Change the number of engines of a running run.

    Added engines take the free devices of the placement. An engine that leaves finishes its requests first.
    """
    match = _TARGET.fullmatch(target)
    if match is None:
        raise UserError(f"{target!r} is not a scale. Write the role and its number: `interlace scale {run} rollout=2`.")
    role, number = role_named(match["role"]).name, int(match["number"])
    if role != "rollout":
        raise UserError(f"{target!r}: the number of {role!r} workers is fixed while a run trains. Scale rollout.")
    if number < 1:
        raise UserError(f"{target!r}: a run needs at least one engine.")
    folder = engines_folder(run)
    Console().print(send_command(folder, "scale", str(number)), highlight=False, soft_wrap=True)
    list_engines(folder)
