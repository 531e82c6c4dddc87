"""Films of held-out episodes, put into a run's folder where the report and TensorBoard find them."""

from collections.abc import Sequence

from interlace.observe.films import show_in_tensorboard, write_films
from interlace.observe.run_folder import RunFolder
from interlace.rollouts.base import Filming


def keep_films(filming: Filming | None, folder: RunFolder, step: int, loggers: Sequence[str] | None) -> str:
    """Writes what an evaluation's episodes were filmed as. Returns a sentence where something is missing.

    loggers: the recipe's; TensorBoard gets the contact sheet where it is one of them.
    """
    films = filming.films() if filming else ()
    if not films:
        reason = filming.why_no_films() if filming else ""
        return f"no videos: {reason}" if reason else ""
    if loggers is None or "tensorboard" in loggers:
        show_in_tensorboard(folder.path, step, films)
    return write_films(folder.videos, step, films)
