"""`interlace engines` and `interlace scale`: list the engines of a run, and change them during training."""

import json
import re
import time
import uuid
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from interlace.cli.preflight import complete_run, say
from interlace.core.errors import UserError
from interlace.observe.atomic_file import write_atomic
from interlace.observe.run_folder import RunFolder, run_folder
from interlace.observe.run_lock import is_held
from interlace.schedule.placement import role_named

PATIENCE_S = 600.0
"""Seconds that a run may take to apply a change."""
VERBS = ("add", "drain", "remove")
_TARGET = re.compile(r"(?P<role>[^=]+)=(?P<number>-?\d+)")


def engines(
    run: Annotated[
        str, typer.Argument(help="Name of a run that trains now, or its folder.", autocompletion=complete_run)
    ],
    verb: Annotated[str | None, typer.Argument(help="add, drain or remove. Default: list the engines.")] = None,
    engine: Annotated[str | None, typer.Argument(help="Address of a server, or the number of an engine.")] = None,
) -> None:
    """List the engines of a running run, or add, drain and remove one.

    drain lets running requests end first; remove hands them to the other engines with the tokens so far.
    """
    if verb is None:
        _list_engines(run_folder(run).engines)
    elif verb not in VERBS or engine is None:
        raise UserError(
            f"{verb!r}: write `interlace engines {run} add|drain|remove URL|N`, or for a number of engines `interlace "
            f"scale {run} rollout=N`."
        )
    else:
        _change_engines(run, verb, engine)


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
        raise UserError(f"{target!r}: a run needs at least one engine. Write rollout=1 or more, or stop the run.")
    _change_engines(run, "scale", str(number))


def _change_engines(run: str, verb: str, engine: str) -> None:
    """Sends a command to the run, and prints its answer and the engines."""
    folder = run_folder(run).engines
    say(Console(), _send_command(folder, verb, engine))
    _list_engines(folder)


def _send_command(folder: Path, verb: str, engine: str) -> str:
    """Sends a command to the run and returns its answer. Raises UserError if the run refuses or does not answer."""
    commands = folder / "commands"
    if not is_held(RunFolder(path=folder.parent)):
        raise UserError(f"{folder.parent} is not a run that trains now. A later start has the engines of its last one.")
    if not commands.is_dir():
        raise UserError(
            f"{folder.parent} has no folder {commands}: its engines are in its process, or it has not begun."
        )
    name = f"{time.time_ns()}-{uuid.uuid4().hex[:8]}"
    file = commands / f"{name}.json"
    write_atomic(file, json.dumps({"verb": verb, "engine": engine}))
    answer = commands / f"{name}.answer"
    deadline = time.monotonic() + PATIENCE_S
    try:
        while not answer.exists():
            if not is_held(RunFolder(path=folder.parent)):
                raise UserError(f"{folder.parent} has ended before it executed the command.")
            if time.monotonic() > deadline:
                raise UserError(f"the run did not answer within {PATIENCE_S:.0f} s. Is it still training?")
            time.sleep(0.1)
    finally:
        file.unlink(missing_ok=True)  # a later start of the run would execute it
    said = answer.read_text(encoding="utf-8")
    answer.unlink()
    if said.startswith("error: "):
        raise UserError(said.removeprefix("error: "))
    return said


def _list_engines(folder: Path) -> None:
    """Prints the engines of a run. Raises UserError if the run has no list of them."""
    state = folder / "state.json"
    if not state.is_file():
        raise UserError(
            f"{folder.parent} has no list of engines: its engines are in its process, or it has not started."
        )
    table = Table("engine", "address", "state", "version", "running", "queued", "reason")
    for row in json.loads(state.read_text(encoding="utf-8")):
        cells = (row["name"], row["url"], row["state"], row["version"], row["num_running"], row["num_queued"])
        table.add_row(*map(str, cells), row["reason"])
    if not is_held(RunFolder(path=folder.parent)):
        Console().print("The run does not train now; these were its engines.")
    Console().print(table)
