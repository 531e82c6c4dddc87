"""Checkpoints of a run: written while the run continues, and read when it is resumed.

A run that lost a trainer starts again from a checkpoint in the shared memory of this machine. They are written more
often than those on disk, so that fewer steps are repeated. They end with the command.
"""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from interlace.core.errors import UserError
from interlace.core.types import JSON
from interlace.flows.run import RoleGroups
from interlace.observe.checkpoints import Checkpoints, read_identity
from interlace.observe.progress import ProgressView
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import (
    RunIdentity,
    check_changed_settings,
    create_run_id,
    read_run_id,
    write_settings,
)
from interlace.observe.run_logs import RunLogs
from interlace.observe.run_sessions import record_session
from interlace.rewards.config import GIVEN
from interlace.robots.replay.learning import Learning
from interlace.run.evaluation import Evaluation
from interlace.run.recipe.config import Recipe
from interlace.run.state import RunState
from interlace.runtime.cluster import Cluster, record_work
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


CRITIC_FOLDER = "critic"
"""Folder of the value model in a checkpoint, if the algorithm has one."""
REPLAY_FOLDER = "replay"
"""Folder of stored trajectories: in a checkpoint, and in a run for trajectories that do not fit into memory."""
WORLD_MODEL_FOLDER = "world_model"
"""Folder of the published world models in a run, and within REPLAY_FOLDER of a checkpoint."""
COPY_FOLDER = "copied"
"""Folder within a run's REPLAY_FOLDER for the replay's content in the next checkpoint."""

SAVE_WITHIN_S = 15.0
"""Seconds to write a checkpoint when a stopped run did not reach the end of its step."""


class Saver:
    """Copies the trained models at a step boundary, and writes the copies during the next steps."""

    def __init__(
        self,
        cluster: Cluster,
        checkpoints: Checkpoints,
        groups: RoleGroups,
        folder: RunFolder,
        learning: Learning | None = None,
        *,
        every: int,
        memory: MemoryCheckpoints,
        settings: Mapping[str, JSON] | None = None,
    ) -> None:
        """folder: the run's folder, whose metrics and samples belong to a checkpoint.

        every: steps between two checkpoints on disk; 0 for none. memory: the checkpoints between them. settings: the
        run's settings, with secrets masked, which each checkpoint contains.
        """
        self._every, self._memory = every, memory
        self._settings = settings or {}
        self._learning, self._copied = learning, folder.path / REPLAY_FOLDER / COPY_FOLDER
        self._cluster, self._checkpoints, self._folder = cluster, checkpoints, folder
        self._trained = {".": groups.actor, **({CRITIC_FOLDER: groups.critic} if groups.critic else {})}
        """Folder within a checkpoint -> worker group of its model."""
        self._writing: asyncio.Future[None] | None = None
        self._writing_step = 0
        """Step of the checkpoint that is being written."""
        self._saved_step = 0
        """Step of the newest checkpoint on disk that is written or being written."""
        self._synced = 0
        """Step up to which samples are known to be on disk."""

    async def copy(self) -> float:
        """Copies the models. Returns the seconds of delay, which include the wait for an earlier checkpoint's end."""
        start_s = self._cluster.clock.now()
        await self.finish()
        await asyncio.gather(*(group.copy_checkpoint() for group in self._trained.values()))
        if self._learning:
            shutil.rmtree(self._copied, ignore_errors=True)
            self._copied.mkdir()
            self._learning.save(self._copied)
            if self._learning.world and self._learning.world.folder.is_dir():
                shutil.copytree(self._learning.world.folder, self._copied / WORLD_MODEL_FOLDER)
        return self._cluster.clock.now() - start_s

    def find_due(self, step: int, *, is_best: bool) -> Checkpoints | None:
        """Returns the checkpoints, on disk or in memory, to which this step's is written; None if none is due."""
        if is_best or (self._every and step % self._every == 0):
            return self._checkpoints
        return self._memory.find_due(step)

    def write(self, state: RunState, to: Checkpoints) -> None:
        """Starts to write the copied models. A failure on disk ends the run."""
        self._writing_step = state.done_steps
        if to is self._checkpoints:
            self._saved_step = state.done_steps
        self._writing = asyncio.get_running_loop().create_future()
        self._cluster.spawn(self._write_checkpoint(state, to, self._writing), name="checkpoint")

    @property
    def checkpoints(self) -> Checkpoints:
        return self._checkpoints

    async def finish(self) -> None:
        """Waits until the checkpoint that is being written is complete."""
        if self._writing:
            await self._cluster.waits.wait_for(
                self._writing, who="checkpoint", what=f"step {self._writing_step} is written"
            )

    async def save(self, state: RunState) -> None:
        """Writes the step's checkpoint at the end of a run, and waits until it is complete."""
        if self._saved_step != state.done_steps and state.done_steps not in self._checkpoints.steps():
            await self.copy()
            self.write(state, self._checkpoints)
        await self.finish()

    async def finish_in_time(self) -> None:
        """Waits for the checkpoint that is being written, at most SAVE_WITHIN_S."""
        await asyncio.wait({asyncio.ensure_future(self.finish())}, timeout=SAVE_WITHIN_S)

    async def save_in_time(self, state: RunState) -> None:
        """Writes the step's checkpoint as save() does; gives up after SAVE_WITHIN_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAVE_WITHIN_S):
                await self.save(state)

    async def delete_replaced(self) -> None:
        """Deletes the run that this one replaces, if there is one. A failure is reported, and the run continues."""
        folder = self._folder
        if not folder.replaced.exists():
            return
        try:
            deleted = asyncio.to_thread(folder.delete_replaced)  # Large folders take long.
            await record_work(self._cluster, "replaced run", "deletion", deleted)
        except OSError as error:
            self._cluster.notes.add(f"the replaced run is not deleted: {error}. Delete {folder.replaced} yourself.")

    async def _write_checkpoint(self, state: RunState, to: Checkpoints, done: "asyncio.Future[None]") -> None:
        loop = asyncio.get_running_loop()

        async def write_models(folder: Path) -> None:
            for place, group in self._trained.items():
                await group.write_checkpoint(folder / place)

        def write(folder: Path) -> None:
            asyncio.run_coroutine_threadsafe(write_models(folder), loop).result()
            if self._learning:
                shutil.move(self._copied, folder / REPLAY_FOLDER)
            RunLogs(self._folder).copy_to(state.done_steps, folder, synced=self._synced)
            self._synced = state.done_steps
            write_settings(folder, self._settings)
            state.write(folder)

        num_bytes: int = sum([await group.checkpoint_bytes() for group in self._trained.values()])
        # In a thread, because the write waits for the disk.
        written = asyncio.to_thread(to.save, state.done_steps, write, num_bytes=num_bytes)
        try:
            await record_work(self._cluster, "checkpoint", "write", written)
        except UserError as error:
            if to is self._checkpoints:
                raise
            self._memory.stop()  # a full memory costs repeated steps, not the run
            self._cluster.notes.add(f"no further checkpoints in memory (recovery.memory_checkpoint_every): {error}")
        done.set_result(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """Starting point of one process of a run."""

    checkpoint: Path | None = None
    """Checkpoint to resume from; None at the start of the whole run."""
    state: RunState | None = None
    """State of the run in the checkpoint."""
    is_first: bool = True
    """False if an earlier process began the run. Without a checkpoint, its steps are void."""

    @property
    def done_steps(self) -> int:
        """Returns the number of steps done by earlier processes."""
        return self.state.done_steps if self.state else 0

    @property
    def before(self) -> Evaluation | None:
        """Returns the evaluation before the first step, if an earlier process made it."""
        return self.state.before if self.state else None


def identify_run(recipe: Recipe, folder: RunFolder, *, resume: bool) -> RunIdentity:
    """Makes the identity of a new run, or reads the identity of a resumed one.

    Records this process in the run's sessions. If the file with the id is lost, the id of the newest checkpoint with a
    readable manifest is used.
    """
    run = read_run_id(folder.path) if resume else None
    checkpoints = Checkpoints(folder.checkpoints, keep=1)
    for step in reversed(checkpoints.steps()) if run is None and resume else ():
        with contextlib.suppress(OSError, ValueError):
            found = read_identity(checkpoints.path(step))
            run = run or (found.run if found else None)
    record_session(folder.path, sys.argv)
    return RunIdentity(run=run or create_run_id(folder.path), model=recipe.model.path)


def find_resumed_start(
    folder: RunFolder,
    checkpoints: Checkpoints,
    memory: MemoryCheckpoints,
    progress: ProgressView,
    settings: Mapping[str, JSON],
    *,
    has_samples: bool,
) -> RunStart:
    """Truncates a run's logs to its newest complete checkpoint and starts there; from step 0 if there is none.

    memory: checkpoints of this command in shared memory, of which a newer one is used. settings: the settings of the
    resumed run, with secrets masked. has_samples: whether its steps write samples. Damaged checkpoints are set aside,
    and `progress` shows them and the changed settings. Raises UserError if all are damaged, if the newest complete one
    belongs to another run, model or step, or if a changed setting would make the resumed run another run.
    """
    newest = memory.find_newer(checkpoints) or _newest_whole(folder, checkpoints, progress)
    for change in check_changed_settings(newest, settings, program_names=GIVEN) if newest else ():
        progress.say(f"changed since {newest}: {change}")
    start = RunStart(checkpoint=newest, state=RunState.read(newest) if newest else None, is_first=False)
    for lost in RunLogs(folder).return_to(start.done_steps, newest, has_samples=has_samples):
        progress.say(lost)
    if newest:
        progress.say(f"resuming after step {start.done_steps} from {newest}")
    return start


def _newest_whole(folder: RunFolder, checkpoints: Checkpoints, progress: ProgressView) -> Path | None:
    found = checkpoints.newest_whole()
    damage = [f"{path} {reason}" for path, reason in found.damaged.items()]
    if damage and found.path is None:
        raise UserError(
            f"run {folder.name!r} has no whole checkpoint to go on from: {'; '.join(damage)}. Start it again "
            "without --resume: with --overwrite, or under another name (--name)."
        )
    for path, sentence in zip(found.damaged, damage, strict=True):
        progress.say(f"{sentence}; set aside as {checkpoints.set_aside(path).name}")
    return found.path
