"""`interlace watch`: the live page of runs."""

import asyncio
import os
from typing import Annotated

import typer

from interlace.cli.preflight import RUNS_HELP, STEP_HELP, complete_run
from interlace.observe.run_folder import RunFolder, run_folder
from interlace.observe.stop import raise_on_stop_signals

NICENESS = 10
"""Priority of the server: the cores belong to the run."""


def watch(
    runs: Annotated[list[str], typer.Argument(help=RUNS_HELP, autocompletion=complete_run)],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8001,
    step: Annotated[int | None, typer.Option(help=STEP_HELP, min=1)] = None,
) -> None:
    """Serve a page of runs that follows their files: curves, devices, samples, settings; also after they ended."""
    folders = [run_folder(run) for run in runs]
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    raise_on_stop_signals()
    try:
        asyncio.run(_serve_page(folders, port, step))
    except KeyboardInterrupt:
        print("stopped")


async def _serve_page(folders: "list[RunFolder]", port: int, step: int | None) -> None:
    from interlace.observe.watch.server import WatchServer

    server = WatchServer(folders, step)
    print(f"watching {', '.join(folder.name for folder in folders)}: {await server.start(port)}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()
