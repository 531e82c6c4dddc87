"""Settings of a robot's episodes that a world model plays in place of the simulator."""

from pathlib import Path

from pydantic import Field

from interlace.core.config import Config
from interlace.core.types import Prompt
from interlace.data.starts import IMAGINED
from interlace.models.published import newest_model
from interlace.robots.envs.load import EnvConfig


class ImaginationConfig(Config):
    """Episodes of rows that `task.starts.imagined_per_start` adds. Until the run has published a first world model
    they are played in the simulator."""

    chunks: int = Field(default=4, ge=1)
    """Chunks after which an imagined episode is cut off; the critic then values its last state."""
    max_disagreement: float = Field(gt=0)
    """Spread between the ensemble's members, in units of how much a chunk changes the state, that cuts it off too."""
    slots: int = Field(default=16, ge=1)
    """Imagined environments at once, in one process."""
    published_in: str | None = None
    """Folder of published world models; None: the run's own, which the run fills in."""

    def plays(self, prompt: Prompt) -> bool:
        """Returns whether a prompt's episode is to be imagined, and can be."""
        return (
            bool(prompt.metadata.get(IMAGINED))
            and self.published_in is not None
            and bool(newest_model(Path(self.published_in)))
        )

    def environments(self, chunk: int) -> EnvConfig:
        """Returns the environments. chunk: actions of a chunk, K."""
        settings: dict[str, object] = {
            "tasks": ["imagined"],
            "model": self.published_in,
            "horizon": self.chunks * chunk,
            "max_disagreement": self.max_disagreement,
        }
        return EnvConfig(family="imagined", settings=settings, num_envs=self.slots)
