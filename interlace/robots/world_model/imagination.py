"""Settings of a robot's episodes in a world model that replaces the simulator."""

import json
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.types import Prompt
from interlace.data.starts import IMAGINED
from interlace.models.published import newest_model
from interlace.robots.envs.load import EnvConfig

ERRORS = "errors.json"
"""File of a saved model with its measured errors by number of chunks."""


class ImaginationBounds(Config):
    """Bounds of a world model's error, which end imagined episodes."""

    max_error: float | None = Field(default=None, gt=0)
    """Bound of the model's measured error, which shortens imagined episodes: they end at the last of 1, 2, 4, 8 and 16
    chunks up to which the error on new episodes of the last step was not above it. In units of a chunk's typical
    change. If the error is above it after one chunk, the simulator is used. If None, no bound."""
    max_disagreement: float | None = Field(default=None, gt=0)
    """Spread between the members of an ensemble that also ends the episode, in the same units. If None, no bound."""


class ImaginationConfig(ImaginationBounds):
    """Episodes of rows that `task.starts.imagined_per_start` adds. Until the run has published a world model that may
    be used, they run in the simulator.
    """

    chunks: int = Field(default=4, ge=1)
    """Largest length of an imagined episode in chunks; the critic values its last state."""
    slots: int = Field(default=16, ge=1)
    """Number of concurrent imagined environments, in one process."""
    published_in: str | None = None
    """Folder of published world models. If None, the run sets its own folder."""

    @model_validator(mode="after")
    def _check_error_limits(self) -> Self:
        if self.max_error is None and self.max_disagreement is None:
            raise ValueError(
                "imagined episodes are not bounded by the model's error: set max_error, such as 1.0, or "
                "max_disagreement, such as 0.5, or both"
            )
        return self

    def is_imagined(self, prompt: Prompt) -> bool:
        """Returns whether a prompt requests an imagined episode, and a world model that may be used is published."""
        if not prompt.metadata.get(IMAGINED) or self.published_in is None:
            return False
        newest = newest_model(Path(self.published_in))
        return newest is not None and measured_horizon(newest, self.max_error, self.chunks) > 0

    def environments(self, chunk: int) -> EnvConfig:
        """Returns the settings of the environments. chunk: actions of a chunk, K."""
        settings: dict[str, object] = {
            "tasks": ["imagined"],
            "model": self.published_in,
            "horizon": self.chunks * chunk,
            "max_error": self.max_error,
            "max_disagreement": self.max_disagreement,
        }
        return EnvConfig(family="imagined", settings=settings, num_envs=self.slots)


def measured_horizon(folder: Path, max_error: float | None, chunks: int) -> int:
    """Returns the number of chunks that a saved model may imagine, at most `chunks`.

    It is the last measured number of chunks up to which no error exceeds max_error; 0 if no error was measured.
    """
    if max_error is None:
        return chunks
    file, found = folder / ERRORS, 0
    saved = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    errors = {int(place): error for place, error in saved.items()}
    for place in sorted(errors):
        if not errors[place] <= max_error:  # also if it is not a number
            break
        found = place
    return min(chunks, found)
