"""Choice of the display of a run: in a notebook, on a terminal, or elsewhere."""

from rich.console import Console

from interlace.observe.notebook import NotebookProgress, is_notebook
from interlace.observe.progress import LiveProgress, PlainProgress, ProgressView, QuietProgress


def open_progress(console: Console, *, num_steps: int, quiet: bool = False) -> ProgressView:
    """Opens the display that fits the console. In a notebook that is one display, which is redrawn."""
    if quiet:
        return QuietProgress()
    if is_notebook():
        return NotebookProgress(num_steps)
    return LiveProgress(console, num_steps) if console.is_terminal else PlainProgress(console, num_steps)
