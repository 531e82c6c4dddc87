"""`interlace advise`: suggests settings for a run."""

from typing import Annotated

import typer
from rich.console import Console

from interlace.cli.preflight import disable_progress_bars, say
from interlace.observe.atomic_file import write_atomic
from interlace.observe.run_folder import run_folder


def advise(
    run: Annotated[str, typer.Argument(help="Name or folder of a run of this machine with five or more steps.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Suggest up to three settings that shorten a run's step, by simulating changes under the costs of its records."""
    disable_progress_bars()
    folder = run_folder(run)
    from interlace.forecast.advice import advise as find_advice  # loads torch
    from interlace.observe.jsonl import to_line

    advice = find_advice(folder)
    row = to_line(advice.row())
    write_atomic(folder.advice, row)
    if as_json:
        print(row, end="")
        return
    say(Console(), "\n".join(advice.lines))
