"""Contents of a checkpoint beside weights and optimizer: the state of the run."""

import json
from pathlib import Path

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.data.stream import StreamState
from interlace.run.evaluation import Evaluation

STATE_FILE = "state.json"


class RunState(Config):
    """Enough to go on as if nothing had happened."""

    done_steps: int
    num_groups: int
    """Admitted so far: numbers that are taken."""
    stream: StreamState
    """Prompts that were drawn and not trained on are in it, to be served first."""
    before: Evaluation | None
    """Held-out accuracy before the first step."""

    def write(self, folder: Path) -> None:
        """Beside the model of a checkpoint."""
        (folder / STATE_FILE).write_text(self.model_dump_json(indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "RunState":
        """Raises UserError where the folder is not a checkpoint, or another version's."""
        path = folder / STATE_FILE
        if not path.is_file():
            raise UserError(f"{folder} is no checkpoint to resume from: {STATE_FILE} is missing.")
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged: {error}. Delete {folder} to resume from the one before.") from None
        return cls.parse(found, where=str(path))
