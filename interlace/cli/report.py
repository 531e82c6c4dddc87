"""`interlace report`: writes the results of runs as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from interlace.cli.preflight import RUNS_HELP, STEP_HELP, complete_run, writable
from interlace.observe.run_folder import run_folder


def report(
    runs: Annotated[list[str], typer.Argument(help=RUNS_HELP, autocompletion=complete_run)],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Default: report.html in the first run's folder.")
    ] = None,
    step: Annotated[int | None, typer.Option(help=STEP_HELP, min=1)] = None,
) -> None:
    """Write one self-contained HTML page: curves, goodput, a step on each device, histograms, transcripts, settings."""
    from interlace.observe.report.page import write_report

    folders = [run_folder(run) for run in runs]
    path = writable(out or folders[0].path / "report.html", "--out")
    write_report(folders, path, step=step)
    print(path)
