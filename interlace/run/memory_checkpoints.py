"""Checkpoints in the shared memory of this machine, from which a run that lost a trainer starts again.

They are written more often than those on disk, so that fewer steps are repeated. They end with the command.
"""

from pathlib import Path

from interlace.core.errors import UserError
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.run_identity import RunIdentity
from interlace.runtime.process.shared import make_shared_folder


class MemoryCheckpoints:
    """The newest state of a run in shared memory, if the recipe asks for it."""

    def __init__(self, every: int, run: RunIdentity) -> None:
        """every: steps between two checkpoints; 0 for none. Raises UserError if this machine has no shared memory."""
        self._every, self._folder = every, make_shared_folder() if every else None
        if every and self._folder is None:
            raise UserError(
                f"recovery.memory_checkpoint_every = {every} needs the folder /dev/shm, which this machine does not "
                "have. Set it to 0."
            )
        self._checkpoints = Checkpoints(self._folder.path / "checkpoints", keep=1, run=run) if self._folder else None

    def find_due(self, step: int) -> Checkpoints | None:
        """Returns the checkpoints to which this step's is written; None if none is due."""
        return self._checkpoints if self._every and step % self._every == 0 else None

    def find_newer(self, disk: Checkpoints) -> Path | None:
        """Returns the undamaged checkpoint in memory if it is of a later step than those on disk; else None."""
        found, newest_on_disk = self._checkpoints, max(disk.steps(), default=0)
        if found is None or max(found.steps(), default=0) <= newest_on_disk:
            return None
        whole = found.newest_whole()
        for path in whole.damaged:
            found.set_aside(path)
        return whole.path if max(found.steps(), default=0) > newest_on_disk else None

    def keep_start(self, step: int | None) -> None:
        """Keeps the checkpoint that a process started from in addition; None at the end of the process."""
        if self._checkpoints:
            self._checkpoints.keep_start(step)

    def stop(self) -> None:
        """Writes no more checkpoints, after the memory was full."""
        self._every = 0

    def close(self) -> None:
        """Removes the checkpoints at the end of the command."""
        self._checkpoints = None
        if self._folder:
            self._folder.remove()
            self._folder = None
