"""Recorder of pictures of an episode while it runs."""

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.observe.films import Film


class FilmRecorder:
    """Records a picture after the reset and after each chunk. Passed to EnvEpisode.film()."""

    def __init__(self, name: str, *, label: str = "") -> None:
        """name: name of the film: the task and the initial state. label: see Film."""
        self._name, self._label = name, label
        self._frames: list[NDArray[np.uint8]] = []
        self.problem = ""
        """Reason why drawing failed; empty if it works."""

    def take(self, picture: NDArray[np.uint8]) -> None:
        """Adds a picture."""
        self._frames.append(picture)

    def give_up(self, error: UserError) -> None:
        """Ends the recording; the episode continues without it."""
        self.problem = str(error)

    def film(self, caption: str) -> Film | None:
        """Returns the film; None without pictures. caption: the outcome of the episode."""
        if not self._frames:
            return None
        return Film(name=self._name, caption=caption, frames=tuple(self._frames), label=self._label)
