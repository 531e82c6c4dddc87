"""`interlace profile`: a running job traced from outside."""

from typing import Annotated

import typer

from interlace.cli.report import run_folder


def profile(
    attach: Annotated[str, typer.Option("--attach", metavar="RUN", help="Name or folder of a running job to trace.")],
    seconds: Annotated[float, typer.Option(help="How long it is traced.")] = 5.0,
) -> None:
    """Trace every process of a running job with torch's profiler, while it goes on."""
    from interlace.observe.live import trace_run

    for path in trace_run(run_folder(attach), seconds, say=print):
        print(path)
