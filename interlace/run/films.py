"""Writes films of held-out episodes into a run's folder, for the report and TensorBoard."""

from collections.abc import Sequence

from interlace.observe.films import show_in_tensorboard, write_films
from interlace.observe.run_folder import RunFolder
from interlace.rollouts.base import Filming


def keep_films(filming: Filming | None, folder: RunFolder, step: int, loggers: Sequence[str] | None) -> str:
    """Writes the films of an evaluation's episodes. Returns a sentence if a film is missing.

    loggers: the recipe's loggers; if they include TensorBoard, it gets the contact sheet.
    """
    films = filming.films() if filming else ()
    if not films:
        reason = filming.why_no_films() if filming else ""
        return f"no videos: {reason}" if reason else ""
    if loggers is None or "tensorboard" in loggers:
        show_in_tensorboard(folder.path, step, films)
    return write_films(folder.videos, step, films)
