"""State of a run in a checkpoint, in addition to weights and optimizer."""

import json
from pathlib import Path

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.data.stream import PromptStream, StreamState
from interlace.run.evaluation import Evaluation
from interlace.schedule.steps import Places
from interlace.stages.admission import GroupInFlight

STATE_FILE = "state.json"


class SavedGroup(Config):
    """A group in flight: admitted, and not trained on."""

    gid: int
    """Its number."""
    uid: str
    """Its prompt, which is among the pending draws of the stream."""
    epoch: int
    """Epoch of the prompt."""
    ended: tuple[int, ...] = ()
    """Indices of its samples that have ended."""


class SavedPlaces(Config):
    """Places of unfinished steps; see Places."""

    next_slot: int
    groups: tuple[int, ...]
    empty: tuple[int, ...]
    num_refills: dict[int, int]

    @classmethod
    def of(cls, places: Places) -> "SavedPlaces":
        return cls(
            next_slot=places.next_slot, groups=places.groups, empty=places.empty, num_refills=dict(places.num_refills)
        )

    def read(self) -> Places:
        return Places(next_slot=self.next_slot, groups=self.groups, empty=self.empty, num_refills=self.num_refills)


class RunState(Config):
    """Everything needed to resume a run with the same results as an uninterrupted one."""

    done_steps: int
    num_groups: int
    """Number of groups admitted so far; later groups get higher numbers."""
    stream: StreamState
    """State of the prompt stream. It includes prompts that were drawn but not trained on, which are drawn first."""
    before: Evaluation | None
    """Held-out accuracy before the first step."""
    in_flight: tuple[SavedGroup, ...] = ()
    """Groups that are admitted again under their numbers, ascending. Each sample then ends once in the samples."""
    places: SavedPlaces | None = None
    """Places of the steps of these groups. None if batches take groups in the order of their arrival."""

    def draw_groups(self, stream: PromptStream) -> list[GroupInFlight]:
        """Returns the groups in flight, with their prompts of a restored stream."""
        return [
            GroupInFlight(gid=group.gid, prompt=stream.take(group.uid, group.epoch), ended=group.ended)
            for group in self.in_flight
        ]

    def write(self, folder: Path) -> None:
        """Writes the state into the folder of a checkpoint."""
        (folder / STATE_FILE).write_text(self.model_dump_json(indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "RunState":
        """Reads the state of a checkpoint. Raises UserError if it is missing, damaged, or of another version."""
        path = folder / STATE_FILE
        if not path.is_file():
            raise UserError(f"{folder} is no checkpoint to resume from: {STATE_FILE} is missing.")
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged: {error}. Delete {folder} to resume from the one before.") from None
        return cls.parse(found, where=str(path))
