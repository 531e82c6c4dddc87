"""`interlace report`: writes the results of runs as one HTML page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.cli.complete import RUNS_HELP, complete_run
from interlace.cli.preflight import ROOT, writable
from interlace.core.errors import UserError

if TYPE_CHECKING:
    from interlace.observe.run_folder import RunFolder


def report(
    runs: Annotated[list[str], typer.Argument(help=RUNS_HELP, autocompletion=complete_run)],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Default: report.html in the first run's folder.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Step whose operations are drawn, device by device. Default: the middle one.")
    ] = None,
) -> None:
    """Write one self-contained HTML page: curves, goodput, a step on each device, histograms, transcripts, settings."""
    from interlace.observe.report.page import write_report

    folders = [run_folder(run) for run in runs]
    path = writable(out or folders[0].path / "report.html", "--out")
    write_report(folders, path, step=step)
    print(path)


def run_folder(spec: str) -> "RunFolder":
    """Finds a run by its name or folder. Raises UserError if it does not exist."""
    found = find_run(spec)
    if found is None:
        raise UserError(f"{spec!r} is no run: neither {spec} nor {ROOT / spec} holds a config.yaml.")
    return found


def find_run(spec: str, root: Path = ROOT) -> "RunFolder | None":
    """Finds a run by its name or folder; None if it does not exist. root: folder of the runs."""
    from interlace.observe.run_folder import RunFolder

    folders = (RunFolder(path=path) for path in (Path(spec), root / spec))
    return next((folder for folder in folders if folder.config.is_file()), None)
