"""Causes of failures, one list for samples, errors and metrics, and rules of recovery.

The rules set how often a sample is drawn again, when admission pauses, how often a process is restarted.
"""

import errno
import re
from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from interlace.core.config import Config
from interlace.core.errors import (
    EpisodeLostError,
    FailedUpdatesError,
    HangError,
    PayloadLostError,
    RemoteError,
    RestartBudgetError,
    UserError,
    WorkerDiedError,
    is_full_disk,
)


class Cause(StrEnum):
    """The part of a run that caused a failure."""

    POLICY = "policy"
    TOOL = "tool"
    SANDBOX = "sandbox"
    VERIFIER = "verifier"
    ENGINE = "engine"
    TRAINER = "trainer"
    NETWORK = "network"
    RESOURCE = "resource"
    """Memory, disk or a process of the machine."""
    USER = "user"
    """Settings or code of the user."""

    @property
    def is_infrastructure(self) -> bool:
        """True if another attempt at the same sample may succeed."""
        return self not in (Cause.POLICY, Cause.USER)


CAUSE_OF_ROLE = {
    "rollout": Cause.ENGINE,
    "env": Cause.SANDBOX,
    "reward": Cause.VERIFIER,
    "reference": Cause.ENGINE,
    "critic": Cause.TRAINER,
    "actor": Cause.TRAINER,
    "world_model": Cause.TRAINER,
}
"""Cause of the death of a role's worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFailure:
    """Failure of one sample."""

    reason: str
    cause: Cause
    is_final: bool = False
    """True if the sample was tried again before, so that it ends now."""
    is_loss: bool = False
    """True if the sample was whole and its content was lost. Another attempt then has the same noise."""


LOST_CONTENT = SampleFailure(reason="the content of the response is lost", cause=Cause.RESOURCE, is_loss=True)
"""Failure of a sample whose stored content cannot be read any more: see core/payload.py."""


_ERRNOS = "|".join(
    str(getattr(errno, name))
    for name in ("EIO", "ENODEV", "ENETUNREACH", "EHOSTUNREACH", "ENOTCONN", "ETIMEDOUT", "ESTALE", "EREMOTEIO")
    if hasattr(errno, name)
)
_INFRASTRUCTURE = re.compile(
    r"^(\w+\.)*(Connection\w*Error|BrokenPipeError|PayloadLostError|Dist(Backend|Network|Store)Error|ncclError)\b"
    rf"|^OSError: \[Errno ({_ERRNOS})\]|^RuntimeError: .*gloo/transport|CUDA error: uncorrectable ECC"
)
"""First line of an error that a connection, a device or a disk caused. gloo raises only RuntimeError."""
_OF_THE_MACHINE = (MemoryError, EpisodeLostError, HangError, PayloadLostError, RestartBudgetError)


def is_infrastructure_error(error: BaseException) -> bool:
    """Returns whether a worker's operation failed by a connection, a device or a disk, so that another may succeed."""
    if not isinstance(error, RemoteError):
        return False
    last = error.remote_traceback.rpartition("Traceback (most recent call last):")[2]
    lines = [line for line in last.splitlines() if line[:1].strip()]
    return any(_INFRASTRUCTURE.search(line) for line in lines[:1])  # further lines belong to the message


def cause_of(error: BaseException, otherwise: Cause = Cause.USER) -> Cause:
    """Returns the cause of an error. otherwise: cause of an error whose type does not determine one."""
    if is_full_disk(error) or isinstance(error, _OF_THE_MACHINE):
        return Cause.RESOURCE
    if isinstance(error, ConnectionError):
        return Cause.NETWORK
    if isinstance(error, TimeoutError):
        return Cause.TOOL
    if isinstance(error, FailedUpdatesError):
        return Cause.TRAINER
    if isinstance(error, UserError):
        return Cause.USER
    if isinstance(error, WorkerDiedError | RemoteError):
        role = re.split(r"[/\[ ]", str(error), maxsplit=1)[0]
        return CAUSE_OF_ROLE.get(role, Cause.RESOURCE if isinstance(error, WorkerDiedError) else otherwise)
    return otherwise


HOUR_S = 3600.0


class RecoveryConfig(Config):
    """Limits of recovery from failures."""

    redraws: int = Field(default=2, ge=0)
    """Further attempts at a sample that failed, unless it failed by the policy or by the user's code. Its prompt is
    drawn again with other noise, so that its group keeps its size."""
    failures_in_a_row: int = Field(default=32, ge=1)
    """Failed attempts of one cause without a scored sample between them, after which no prompt is admitted until an
    attempt succeeds. The first scored sample of a run has to precede them."""
    probe_s: float = Field(default=2.0, gt=0)
    """Seconds from such a pause to its first probe, which is one attempt; doubled for each further probe, up to 60."""
    outage_s: float = Field(default=1800.0, gt=0)
    """Seconds of a pause after which the run ends."""
    restarts_per_hour: dict[str, int] = Field(
        default_factory=lambda: {"rollout": 60, "reward": 600, "episode": 600, "reference": 60, "trainer": 6}
    )
    """Restarts of processes by role (rollout, reward, episode, reference, trainer) within an hour, after which the run
    ends. A role that is not listed has no limit. trainer: restarts of the whole run from its newest checkpoint, in the
    same command, after the end of a process that cannot be replaced; 0 turns them off."""
    restarts_in_a_row: int = Field(default=3, ge=1)
    """Restarts of the whole run without a new step, after which it ends."""
    memory_checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints in the shared memory of this machine; 0: none. A start of the run in the same command
    continues from the newest checkpoint, there or on disk. They take the memory of two checkpoints, and of three after
    such a start."""


class Breaker:
    """Circuit breaker: opens after too many failures of one cause in a row; a success closes it."""

    def __init__(self, failures_in_a_row: int) -> None:
        self._limit = failures_in_a_row
        self._in_a_row: Counter[Cause] = Counter()
        self._has_succeeded = False
        self.open_for: Cause | None = None
        """Cause for which it is open; None while it is closed."""

    def failed(self, cause: Cause) -> bool:
        """Counts a failed attempt. Returns whether the breaker opens with it."""
        self._in_a_row[cause] += 1
        # Without any success, the settings are wrong rather than a service down.
        if self.open_for or not self._has_succeeded or self._in_a_row[cause] < self._limit:
            return False
        self.open_for = cause
        return True

    def succeeded(self) -> bool:
        """Counts a success. Returns whether the breaker closes with it."""
        was_open, self.open_for = self.open_for is not None, None
        self._has_succeeded = True
        self._in_a_row.clear()
        return was_open


class RestartBudget:
    """Budget of the restarts of one role."""

    def __init__(self, role: str, per_hour: int | None) -> None:
        """per_hour: None for no limit."""
        self._role, self._per_hour = role, per_hour
        self._times_s: deque[float] = deque()

    def spend(self, now_s: float) -> str:
        """Counts a restart at a time. Returns the reason if the budget is exhausted, else an empty text."""
        if self._per_hour is None:
            return ""
        while self._times_s and self._times_s[0] <= now_s - HOUR_S:
            self._times_s.popleft()
        self._times_s.append(now_s)
        if len(self._times_s) <= self._per_hour:
            return ""
        return (
            f"processes of the role {self._role!r} ended {len(self._times_s)} times within an hour, and "
            f"recovery.restarts_per_hour.{self._role} is {self._per_hour}"
        )
