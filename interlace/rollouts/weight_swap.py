"""Weights of one rollout engine: the version that it serves, the pending version, and the moment of the swap."""

from collections.abc import Callable

from interlace.rollouts.engine_jobs import EngineJobs
from interlace.rollouts.role_groups import RolloutGroup
from interlace.schedule.schedule import Schedule
from interlace.weights.ref import UpdateMode, WeightRef

UNKNOWN = -1
"""Version of an engine that has received no weights yet, or has lost them."""


class WeightSwap:
    """Holds the pending weights of one engine, and installs them at the moment that `on_update` defines.

    Under `drain` all sequences of the old version finish first. Under the other modes the swap happens between two
    calls of the engine.
    """

    def __init__(
        self, group: RolloutGroup, schedule: Schedule, jobs: EngineJobs, on_recompute: Callable[[], None]
    ) -> None:
        """on_recompute: called when the engine will recompute the KV cache of its running sequences."""
        self._group, self._jobs, self._on_recompute = group, jobs, on_recompute
        self._on_update = schedule.on_update
        self._pending: WeightRef | None = None
        self.version = UNKNOWN
        """Version of the weights that the engine serves."""

    def follow(self, schedule: Schedule) -> None:
        self._on_update = schedule.on_update

    @property
    def pending_version(self) -> int | None:
        return self._pending.version if self._pending else None

    @property
    def has_pending(self) -> bool:
        """True while the engine has received weights that it does not serve yet."""
        return self._pending is not None

    @property
    def starts_new(self) -> bool:
        """False while an update is pending: a new sequence would have an older version than its deadline assumes."""
        return self._pending is None

    @property
    def aborts_sequences(self) -> bool:
        """True if the swap ends the running sequences, which are then resubmitted."""
        return self._on_update == "abort_resume"

    @property
    def keeps_contexts(self) -> bool:
        """True if the KV caches between turns survive a swap."""
        return self._on_update == "keep"

    def receive(self, ref: WeightRef) -> None:
        """Stores new weights until the swap. A newer version replaces a pending one."""
        self._pending = ref

    def has_ready_job(self) -> bool:
        """Returns whether a job is queued that may begin.

        While an update is pending, only a job that began under the present or older weights may.
        """
        following = self._jobs.first()
        if following is None or self.starts_new:
            return following is not None
        versions = following.request.generated_versions
        return len(versions) > 0 and versions[-1] <= self.version

    def take_due(self, num_awaited: int) -> WeightRef | None:
        """Removes and returns the pending weights if they may be installed now, else returns None.

        num_awaited: number of engines whose sequences will move here and finish under this engine's current weights.
        """
        ref = self._pending
        if ref is None or (self._on_update == "drain" and not ref.adapters and self._must_drain(num_awaited)):
            return None
        self._pending = None
        return ref

    def _must_drain(self, num_awaited: int) -> bool:
        return bool(self._jobs.running) or num_awaited > 0 or self.has_ready_job()

    async def install(self, ref: WeightRef) -> None:
        self._group.rank_set.version = ref.version
        # Under drain and abort_resume no sequence runs now, and the caches kept for later turns are of older weights.
        # An engine can serve several adapters, so under drain each sequence finishes with its adapter without a wait.
        mode: UpdateMode = "keep" if self._on_update == "keep" else "recompute"
        if self._on_update == "drain" and ref.adapters:
            mode = "own"
        await self._group.with_cause("publication").update_weights(ref, mode)
        if self._on_update == "recompute":
            self._on_recompute()
        self.version = ref.version

    def forget(self) -> None:
        """Records that the engine lost its weights. Pending weights stay."""
        self.version = UNKNOWN
