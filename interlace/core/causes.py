"""Causes of failures: one list for samples, errors and metrics."""

import errno
import re
from dataclasses import dataclass
from enum import StrEnum

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
