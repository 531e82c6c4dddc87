"""Errors that state the value given, the conflict and the fix."""

import errno
import re
from collections.abc import Iterable

MOST_LISTED = 12
"""Maximum number of names that a message lists. Of longer lists it proposes the closest names."""


class InterlaceError(Exception):
    """Base class of all errors that this package raises intentionally."""


class UserError(InterlaceError):
    """The input cannot work. The command line prints the message and exits with code 2 before any work starts."""


class ContextFullError(UserError):
    """The context of a turn leaves no room for an answer in the longest sequence that an engine holds."""


class DiskFullError(UserError):
    """A file could not be written because the disk is full."""


class SimulationStoppedError(InterlaceError):
    """A simulation was stopped by its limit of real time."""


class HangError(InterlaceError):
    """No operation can make progress; the message contains the wait-for graph."""


class NoProgressError(HangError):
    """No operation ended for `cluster.hang_after_s`; the message contains the wait-for graph."""


class FailedUpdatesError(InterlaceError):
    """The optimizer's updates failed one after another: a loss or a gradient was not finite."""


class StoppedError(InterlaceError):
    """The run was asked to stop before it had a result, or its current operation did not end in time."""


class WorkerDiedError(InterlaceError):
    """The process of a worker ended; the message names the worker and its operation."""


class WorkerAbsentError(WorkerDiedError):
    """No process was started for a worker; the machine with its devices may be gone."""


class WorkerHungError(WorkerDiedError):
    """The process of a worker did not answer for `cluster.hang_after_s`; the run ends the process."""


class RestartBudgetError(UserError):
    """Processes of a role ended too often; the run ends, and its state after the last step is saved."""


class EpisodeFailedError(InterlaceError):
    """An episode in another process failed; the message is the reason that its sample records."""

    def __init__(self, reason: str, cause: str) -> None:
        self.reason, self.cause = reason, cause
        super().__init__(reason)

    def __reduce__(self) -> tuple[type["EpisodeFailedError"], tuple[str, str]]:
        return EpisodeFailedError, (self.reason, self.cause)


class EpisodeLostError(InterlaceError):
    """The process or simulator of an episode ended or failed; the sample may begin again."""


class EpisodeProcessLostError(EpisodeLostError):
    """The process of an episode ended. The sample begins again with the same noise, because the loss is no result."""


class PayloadLostError(InterlaceError):
    """The stored content of a sample does not exist any more."""


class RemoteError(InterlaceError):
    """A worker's operation raised. Contains its group, rank and method, and the remote traceback."""

    def __init__(self, group: str, rank: int, method: str, remote_traceback: str) -> None:
        self.group, self.rank, self.method, self.remote_traceback = group, rank, method, remote_traceback
        super().__init__(f"{group}[rank {rank}].{method}() raised:\n{remote_traceback}")

    def __reduce__(self) -> tuple[type["RemoteError"], tuple[str, int, str, str]]:
        return RemoteError, (self.group, self.rank, self.method, self.remote_traceback)


def is_full_disk(error: BaseException) -> bool:
    """Returns whether an error was caused by a full disk or an exhausted quota."""
    return isinstance(error, DiskFullError) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message; the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(given: str, options: Iterable[str]) -> str:
    """Returns the end of an error on an unknown name: the options that are close, then all if there are few."""
    names = sorted(options)
    close = close_names(given, names)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    if len(names) <= MOST_LISTED:
        return f"{hint} Known: {', '.join(names)}."
    return hint or f" None of the {len(names)} known names is like it."


def close_names(given: str, options: Iterable[str], *, most: int = 8) -> list[str]:
    """Returns the options that a user may have meant, the closest first.

    An option is close if it differs in case only or by few letters, or if one name is the beginning or a part of the
    other: `verl` of `verl-colocated`, `lr` of `optimizer_lr`, `max_token` of `max_new_tokens`.
    """
    names = list(options)
    if given in names:
        return [given]
    wanted = given.lower()
    if same := [name for name in names if name.lower() == wanted]:
        return same[:1]
    allowed = 1 + len(wanted) // 7
    distances = {name: _count_edits(wanted, name.lower(), allowed) for name in names}
    typos = sorted((name for name in names if distances[name] <= allowed), key=lambda name: (distances[name], name))
    if typos:
        return typos[:1]
    related = [name for name in names if len(wanted) > 1 and _shares_part(wanted, name.lower())]
    return related[:most]


def _shares_part(wanted: str, name: str) -> bool:
    """Returns whether one name begins with the other, or one has the words of the other, perhaps shortened."""
    shorter, longer = sorted((wanted, name), key=len)
    if len(shorter) > 3 and longer.startswith(shorter):
        return True
    few, many = sorted((re.findall(r"[^-_.]+", wanted), re.findall(r"[^-_.]+", name)), key=len)
    if len(few) == 1:  # a single word, which is the beginning of many others, is compared as a whole
        return wanted in many
    return bool(few) and all(any(word.startswith(part) for word in many) for part in few)


def _count_edits(one: str, other: str, limit: int) -> int:
    """Counts insertions, deletions, substitutions and swaps of neighbours from one text to the other.

    Stops at `limit` + 1.
    """
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for place, letter in enumerate(one, start=1):
        before, last, row = row, before, [place]
        for column, another in enumerate(other, start=1):
            cost = min(before[column] + 1, row[-1] + 1, before[column - 1] + (letter != another))
            if place > 1 and column > 1 and letter == other[column - 2] and one[place - 2] == another:
                cost = min(cost, last[column - 2] + 1)
            row.append(cost)
    return row[-1]


class EnginesBusyError(UserError):
    """A turn was refused because it would wait for new weights longer than its caller waits."""

    retry_after_s = 1.0
    """Seconds after which the caller may ask again."""
