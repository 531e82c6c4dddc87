"""`interlace replay`: a recorded run again, on the virtual clock."""

from typing import Annotated

import typer

from interlace.cli.report import run_folder


def replay(
    run: Annotated[str, typer.Argument(help="Name or folder of a run.")],
) -> None:
    """Let the controller see what it saw, when it saw it: the same order of admission and completion, or where not."""
    from interlace.core.errors import InterlaceError
    from interlace.jobs.replay import replay as replay_run

    again = replay_run(run_folder(run))
    print(f"admission:  {len(again.admitted)} groups, {again.admission_difference or 'in the recorded order'}")
    print(f"completion: {len(again.completed)} samples, {again.completion_difference or 'in the recorded order'}")
    if not again.is_same:
        raise InterlaceError("the replay went another way than the run.")
