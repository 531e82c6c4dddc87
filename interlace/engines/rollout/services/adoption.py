"""Adoption of a server that an earlier process of the run started: its record in the run's folder, and the checks."""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from pydantic import ValidationError

from interlace.core.config import Config
from interlace.core.errors import InterlaceError
from interlace.engines.rollout.services.http import Address
from interlace.engines.rollout.services.lease import RECORDS, ServerLease, record_file
from interlace.engines.rollout.services.process import ServerCommand, ServerProcess


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

    @property
    def address(self) -> Address:
        return Address(url=self.url, key=self.key)


class NotAdoptedError(InterlaceError):
    """An existing server is not adopted; the message contains the reason."""


def write_record(lease: ServerLease, address: Address, command: ServerCommand, model: str) -> None:
    """Writes the record of a server that is about to start. model: see ServerRecord.model."""
    record = ServerRecord(
        record=str(lease.record),
        folder=str(lease.folder),
        url=address.url,
        key=address.key,
        model=model,
        arguments=tuple(command.arguments),
        environment=command.environment,
    )
    lease.record.parent.mkdir(parents=True, exist_ok=True)
    lease.record.unlink(missing_ok=True)
    with os.fdopen(os.open(lease.record, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(record.model_dump_json())


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
    lease = ServerLease(seconds=seconds, record=file, folder=Path(record.folder))
    guard = lease.connect()
    if guard is None:
        _remove_folder(lease)
        raise NotAdoptedError(f"{named}: it has ended")
    wanted = command(record)
    server = ServerProcess(wanted, record.address, lease, adopted=guard, detaches=detaches)
    changed = "the model" if record.model != model else _describe_change(record, wanted)
    if changed:
        server.stop()
        server.remove_files()
        raise NotAdoptedError(f"{named}, and was ended: {changed} has changed")
    return server


def _remove_folder(lease: ServerLease) -> None:
    """Removes the folder of a server, which contains a whole model, if the guard was killed before it removed it."""
    with contextlib.suppress(OSError):
        if (lock := lease.lock()) is not None:
            shutil.rmtree(lease.folder, ignore_errors=True)
            os.close(lock)


def _end_lease(file: Path) -> None:
    """Removes a record, which ends the lease, and the folder of the server if its guard has ended."""
    record = None
    with contextlib.suppress(OSError, ValidationError):
        record = ServerRecord.model_validate_json(file.read_text(encoding="utf-8"))
    with contextlib.suppress(OSError):
        file.unlink()
    if record is not None and record.record == str(file):  # a copy of a run's folder contains another run's server
        _remove_folder(ServerLease(seconds=0.0, record=file, folder=Path(record.folder)))


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
        number = record.stem.rpartition("-")[2]
        if not number.isdecimal() or record != record_file(folder, int(number)):
            continue  # the file of a user
        if int(number) not in engines:
            _end_lease(record)
            ended.append(f"{record.stem}: a server of the killed process is not adopted, and ends: it has no engine")
    return ended
