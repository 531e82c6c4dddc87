"""Errors that teach: what was given, what it conflicts with, what to do."""

import difflib
import errno
from collections.abc import Iterable


class InterlaceError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(InterlaceError):
    """The input cannot work. The command line prints the message and exits with code 2, before any work starts."""


class DiskFullError(UserError):
    """A file could not be written for lack of space."""


class SimulationStoppedError(InterlaceError):
    """A simulation was stopped by its limit of real time."""


class HangError(InterlaceError):
    """Nothing can make progress any more; the message holds the wait-for graph."""


class StoppedError(InterlaceError):
    """The run was asked to stop, and what it was in the middle of did not end in time."""


class WorkerDiedError(InterlaceError):
    """A worker's process is gone; the message says which, and what it was doing."""


class EpisodeFailedError(InterlaceError):
    """An episode in another process failed; the message is the reason, as its sample ends with it."""


class EpisodeLostError(InterlaceError):
    """The process or simulator that an episode ran in is gone or broke; the sample may begin again."""


class RemoteError(InterlaceError):
    """A worker's operation raised. Carries where (group, rank, method) and the remote traceback."""

    def __init__(self, group: str, rank: int, method: str, remote_traceback: str) -> None:
        self.group, self.rank, self.method, self.remote_traceback = group, rank, method, remote_traceback
        super().__init__(f"{group}[rank {rank}].{method}() raised:\n{remote_traceback}")

    def __reduce__(self) -> tuple[type["RemoteError"], tuple[str, int, str, str]]:
        return RemoteError, (self.group, self.rank, self.method, self.remote_traceback)


def is_full_disk(error: BaseException) -> bool:
    """Says whether an error tells of a disk that is full, or of a quota that is used up."""
    return isinstance(error, DiskFullError) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    )


def nearest(given: str, options: Iterable[str]) -> str:
    """Returns the tail of an unknown-name error: ' Did you mean X?' where an option is close, then the options."""
    names = sorted(options)
    # A system's name is written in small letters here.
    lowered = {name.lower(): name for name in names}
    close = [given] if given in names else difflib.get_close_matches(given.lower(), lowered, n=1, cutoff=0.5)
    hint = f" Did you mean {lowered.get(close[0], close[0])!r}?" if close else ""
    return f"{hint} Known: {', '.join(names)}."


class EnginesBusyError(UserError):
    """Refusal of a turn that would have to wait for new weights for longer than its caller does."""

    retry_after_s = 1.0
    """Seconds after which it may be asked for again."""
