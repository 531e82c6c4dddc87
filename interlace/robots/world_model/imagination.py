"""Settings of a robot's episodes in a world model that replaces the simulator."""

from pathlib import Path

from pydantic import Field

from interlace.core.config import Config
from interlace.core.types import Prompt
from interlace.data.starts import IMAGINED
from interlace.models.published import newest_model
from interlace.robots.envs.load import EnvConfig


class ImaginationConfig(Config):
    """Episodes of rows that `task.starts.imagined_per_start` adds. Until the run has published a world model, they run
    in the simulator.
    """

    chunks: int = Field(default=4, ge=1)
    """Length of an imagined episode in chunks; the critic values its last state."""
    max_disagreement: float = Field(gt=0)
    """Spread between the ensemble's members that also ends the episode, in units of a chunk's typical change of the
    state.
    """
    slots: int = Field(default=16, ge=1)
    """Number of concurrent imagined environments, in one process."""
    published_in: str | None = None
    """Folder of published world models. If None, the run sets its own folder."""

    def plays(self, prompt: Prompt) -> bool:
        """Returns whether a prompt requests an imagined episode, and a world model has been published."""
        return (
            bool(prompt.metadata.get(IMAGINED))
            and self.published_in is not None
            and bool(newest_model(Path(self.published_in)))
        )

    def environments(self, chunk: int) -> EnvConfig:
        """Returns the settings of the environments. chunk: actions of a chunk, K."""
        settings: dict[str, object] = {
            "tasks": ["imagined"],
            "model": self.published_in,
            "horizon": self.chunks * chunk,
            "max_disagreement": self.max_disagreement,
        }
        return EnvConfig(family="imagined", settings=settings, num_envs=self.slots)
