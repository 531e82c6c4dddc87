"""Adoption of a server that an earlier process of the run started: its record in the run's folder, and the checks."""

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from interlace.core.config import Config
from interlace.core.errors import InterlaceError
from interlace.engines.rollout.services.lease import (
    RECORDS,
    ServerLease,
    hold_folder,
    read_number,
    record_file,
    remove_private_folder,
)
from interlace.engines.rollout.services.process import ServerCommand, ServerProcess, kill_stopped_guard, log_file
from interlace.engines.rollout.services.protocol import Address

MOVED = RECORDS.replace("*", "moved-*")
"""Pattern of the records that are about to get the numbers in their names."""
KILLED_S = 5.0
"""Seconds for a killed guard to end."""


class ServerRecord(Config):
    """A server that a run started. The file has mode 0600, because it contains the server's key."""

    record: str
    """Path of this file when it was written. A copy of a run's folder contains another run's server."""
    folder: str
    """Private folder of the server."""
    url: str
    key: str
    model: str
    """Text that is equal for models of equal architecture and sizes."""
    arguments: tuple[str, ...]
    """Command line of the server."""
    environment: Mapping[str, str]
    log: str
    """Path of the server's log."""
    place: str
    """Text that is equal for engines on the same devices of a machine."""

    @property
    def address(self) -> Address:
        return Address(url=self.url, key=self.key)

    def make_lease(self, seconds: float = 0.0) -> ServerLease:
        """Returns the lease of the server. seconds: see ServerLease."""
        return ServerLease(seconds=seconds, record=Path(self.record), folder=Path(self.folder))


class NotAdoptedError(InterlaceError):
    """An existing server is not adopted; the message contains the reason."""


def write_record(lease: ServerLease, address: Address, command: ServerCommand, model: str, *, place: str = "") -> Path:
    """Writes the record of a server that is about to start, and returns its log. model, place: see ServerRecord."""
    log = log_file(lease)
    record = ServerRecord(
        record=str(lease.record),
        folder=str(lease.folder),
        url=address.url,
        key=address.key,
        model=model,
        arguments=tuple(command.arguments),
        environment=command.environment,
        log=str(log),
        place=place,
    )
    lease.record.parent.mkdir(parents=True, exist_ok=True)
    _write_private(lease.record, record)
    return log


def adopt_server(
    file: Path,
    seconds: float,
    model: str,
    command: Callable[[ServerRecord], ServerCommand],
    *,
    detaches: bool = False,
) -> ServerProcess | None:
    """Adopts the server of a record. Returns None if no record exists.

    file: the record. seconds: lease after the adoption. model: see ServerRecord.model. command:
    returns the command line that the run would start a server of a record's address with. detaches: see ServerProcess,
    for a server in its place. Raises NotAdoptedError if the server has ended or belongs to another run. If it runs with
    other settings, it is ended first.
    """
    try:
        record = ServerRecord.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        raise NotAdoptedError(f"{file} cannot be read") from None
    named = f"the server at {record.url} is not adopted"
    if record.record != str(file):
        raise NotAdoptedError(f"{named}: it belongs to the run of {record.record}")
    lease = record.make_lease(seconds)
    guard = lease.connect()
    if guard is None:
        _remove_folder(lease)
        raise NotAdoptedError(f"{named}: it has ended")
    with contextlib.suppress(BlockingIOError):  # a child of the killed process may hold it; the guard holds it as well
        hold_folder(lease.folder)
    wanted = command(record)
    server = ServerProcess(wanted, record.address, lease, adopted=guard, log=Path(record.log), detaches=detaches)
    changed = "the model" if record.model != model else _describe_change(record, wanted)
    if changed:
        server.stop()
        server.remove_files()
        raise NotAdoptedError(f"{named}, and was ended: {changed} has changed")
    return server


def move_servers(folder: Path, places: Mapping[int, str]) -> list[str]:
    """Gives the servers that a killed process of the run left to the engines at their places.

    A server keeps its number if the engine of this number has the same place. folder: with the records. places: place
    of each engine that has a server, by the number of the engine; see ServerRecord.place. Returns a sentence for each
    running server that ends, because another server gets its number.
    """
    folder, free = folder.absolute(), dict(places)
    _finish_renaming(folder)
    records = _read_records(folder)
    running = {number: _is_running(record) for number, record in records.items()}
    moves: dict[int, int] = {}

    def rank(number: int) -> tuple[bool, bool, bool]:
        """Sorts running servers first, then those that keep their number."""
        return running[number] is False, not running[number], places.get(number) != records[number].place

    for number in sorted(records, key=rank):
        place = records[number].place
        others = [each for each, wanted in free.items() if wanted == place and running[number] is not False]
        target = number if free.get(number) == place else next(iter(others), None)
        if target is not None:
            del free[target]
            moves[number] = target
    replaced = [each for each in records if each not in moves and each in moves.values()]
    for number in replaced:
        _end_lease(record_file(folder, number))
    _rename_records(folder, [(records[old], new) for old, new in moves.items() if old != new])
    return [
        f"rollout-{number}: a server of the killed process is not adopted, and ends: another one has its engine"
        for number in replaced
        if running[number]
    ]


def _rename_records(folder: Path, moves: Sequence[tuple[ServerRecord, int]]) -> None:
    """Gives records the numbers of other engines. At each time, each server has a record."""
    for record, number in moves:
        renamed = record.model_copy(update={"record": str(record_file(folder, number))})
        _write_private(folder / MOVED.replace("*", str(number)), renamed)
    for record, _ in moves:
        Path(record.record).unlink(missing_ok=True)
    for _, number in moves:
        (folder / MOVED.replace("*", str(number))).replace(record_file(folder, number))


def _finish_renaming(folder: Path) -> None:
    """Finishes the work of a process that was killed in _rename_records().

    If each server still has its old record, perhaps not all new ones are written, so the new ones are removed.
    """
    old = {record.folder: record.record for record in _read_records(folder).values()}
    new = dict[Path, ServerRecord]()
    for file in folder.glob(MOVED):
        with contextlib.suppress(OSError, ValidationError):
            record = ServerRecord.model_validate_json(file.read_text(encoding="utf-8"))
            if Path(record.record).parent == folder:  # else it is a copy of another run's record
                new[file] = record
    if any(record.folder not in old for record in new.values()):
        for record in new.values():
            if record.folder in old:
                Path(old[record.folder]).unlink(missing_ok=True)
        for file, record in new.items():
            if not Path(record.record).exists():
                file.replace(record.record)
    for file in folder.glob(MOVED):
        file.unlink()


def _read_records(folder: Path) -> dict[int, ServerRecord]:
    """Returns the records of this run that can be read, by the numbers of their engines."""
    found = dict[int, ServerRecord]()
    for file in sorted(folder.glob(RECORDS)):
        with contextlib.suppress(OSError, ValidationError):
            record = ServerRecord.model_validate_json(file.read_text(encoding="utf-8"))
            if record.record == str(file) and (number := read_number(file)) is not None:
                found[number] = record
    return found


def _is_running(record: ServerRecord) -> bool | None:
    """Returns whether a server runs. None if its folder does not exist here, because it is on another machine."""
    try:
        lock = record.make_lease().lock()
    except OSError:
        return None
    if lock is not None:
        os.close(lock)
    return lock is None


def _write_private(file: Path, record: ServerRecord) -> None:
    """Writes a record that only the user can read."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(record.model_dump_json())


def _remove_folder(lease: ServerLease) -> None:
    """Removes the folder of a server, which contains a whole model, if the guard was killed before it removed it.

    A guard that a signal has stopped is killed.
    """
    with contextlib.suppress(OSError):
        lock = lease.lock()
        if lock is None and kill_stopped_guard(lease):  # it looks through all processes of the machine
            lock = lease.lock(KILLED_S)
        if lock is not None:
            remove_private_folder(lease.folder)
            os.close(lock)


def _end_lease(file: Path) -> None:
    """Removes a record, which ends the lease, and the folder of the server if its guard has ended."""
    record = None
    with contextlib.suppress(OSError, ValidationError):
        record = ServerRecord.model_validate_json(file.read_text(encoding="utf-8"))
    with contextlib.suppress(OSError):
        file.unlink()
    if record is not None and record.record == str(file):  # a copy of a run's folder contains another run's server
        _remove_folder(record.make_lease())


def _describe_change(record: ServerRecord, wanted: ServerCommand) -> str:
    """Returns the settings of a command that differ from a record's; empty if none does."""
    before, after = set(record.arguments), set(wanted.arguments)
    if record.arguments != tuple(wanted.arguments):
        return f"its command ({' '.join(sorted(before - after))} is now {' '.join(sorted(after - before))})"
    return "" if record.environment == wanted.environment else "its environment"


def end_unused_servers(folder: Path, engines: Collection[int]) -> list[str]:
    """Ends the servers that a killed process of the run left for engines that the run no longer has.

    folder: with the records; other files in it are ignored. engines: numbers of the run's engines that have servers.
    Returns a sentence for each server.
    """
    ended, folder = list[str](), folder.absolute()  # a record contains its absolute path
    for record in sorted(folder.glob(RECORDS)):
        number = read_number(record)
        if number is not None and number not in engines:  # other files are a user's
            _end_lease(record)
            ended.append(f"{record.stem}: a server of the killed process is not adopted, and ends: it has no engine")
    return ended
