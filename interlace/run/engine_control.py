"""Adds and removes engines while a run trains, by commands in the run's folder and by a list of server addresses."""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import ValidationError

from interlace.core.config import Config
from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import JSON
from interlace.engines.rollout.kinds.address import AddressKind
from interlace.observe.atomic_file import write_atomic
from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.role_groups import RolloutGroup

Verb: TypeAlias = Literal["add", "drain", "remove", "scale"]
LOOK_EVERY_S = 0.5
"""Seconds between two checks of the folder of commands and of the file of addresses."""
RESOLVE_EVERY = 10
"""Checks from one resolution of `rollout.urls_dns` to the next."""
FIRST_RETRY_S, LAST_RETRY_S = 15.0, 600.0
"""Seconds from the failed start of a listed server to the next attempt: initial and maximum."""
STATE = "state.json"
MEMBERS = "members.json"
"""File with the engines that the last command left, which also a later process of the run starts."""
Launch: TypeAlias = Callable[[int, str | None], Awaitable[RolloutGroup]]
"""Starts the engine of a number. The second argument is the address of its server, for an engine at an address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCommand:
    """One change of a run's engines."""

    verb: Verb
    engine: str
    """Address of a server, or the number of an engine. For the verb scale, the number of engines to have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Retry:
    """Next attempt at a server."""

    at_s: float
    """Time on the monotonic clock."""
    pause_s: float
    """Seconds to the attempt after it, if it fails."""


class EngineMembers(Config):
    """The engines that commands left in a run, which starts its engines itself."""

    num_places: int
    """Number of engines that the placement has room for. Under another placement the file does not count."""
    engines: tuple[int, ...]
    """Numbers of the engines."""


def read_members(folder: Path, num_places: int) -> Sequence[int] | None:
    """Returns the numbers of the engines that commands left in a run; None if all engines of the placement start.

    folder: of the run's engines.
    """
    try:
        found = EngineMembers.model_validate_json((folder / MEMBERS).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    is_valid = found.num_places == num_places and found.engines and max(found.engines) < num_places
    return found.engines if is_valid and len(found.engines) < num_places else None


class EngineControl:
    """Executes changes of a run's engines, and writes the list of engines."""

    def __init__(
        self,
        pool: EnginePool,
        folder: Path,
        kind: object,
        launch: Launch,
        *,
        most_engines: int | None = None,
        urls: Sequence[str] = (),
    ) -> None:
        """folder: of the run's engines. kind: the kind of its engines. launch: starts an added engine.

        most_engines: number of engines that the devices of the placement can have. If None, as many as now.
        urls: of the pool's engines, if they are at addresses.
        """
        self._most_engines = len(pool.drivers) if most_engines is None else most_engines
        self._pool, self._folder, self._launch = pool, folder, launch
        self._kind = kind if isinstance(kind, AddressKind) else None
        names = [driver.group.name for driver in pool.drivers]
        self._urls: dict[str, str] = dict(zip(names, urls, strict=False))
        """Address of each engine, by the name of its group."""
        self._next = len(names)
        self._followed: tuple[str, ...] | None = None
        """Listed addresses whose changes were made."""
        self._last_read: tuple[str, ...] | None = None
        self._retries: dict[str, _Retry] = {}
        """Next attempt at each server of the file that could not be added."""
        self._to_drain: tuple[str, ...] = ()
        """Servers that left the list while no other engine served."""
        self._written = ""

    async def run(self) -> None:
        """Checks for changes until the run ends."""
        (self._folder / "commands").mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            for file in sorted((self._folder / "commands").glob("*.json")):
                await self._obey_file(file)
            await self._follow_list(number)
            self._write_state()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _obey_file(self, file: Path) -> None:
        """Executes the command of a file and answers it. Its sender may remove the file at any time."""
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return  # the sender does not wait for it any longer
        try:
            said = await self.execute(EngineCommand(**json.loads(text)))
        except (InterlaceError, TypeError, ValueError) as error:
            said = f"error: {error}"
        if file.exists():
            write_atomic(file.with_suffix(".answer"), said)
            file.unlink(missing_ok=True)
        else:
            self._pool.membership.notes.add(f"a command whose sender did not wait for it: {said}")

    async def execute(self, command: EngineCommand) -> str:
        """Executes a command. Returns a description of the result. Raises UserError or InterlaceError on failure."""
        try:
            return await self._change_engines(command)
        finally:
            self._write_members()

    async def _change_engines(self, command: EngineCommand) -> str:
        membership = self._pool.membership
        if command.verb == "scale":
            return await self._scale_engines(command.engine)
        if command.verb == "add":
            driver = await self._add_engine(command.engine)
            return f"{driver.group.name} serves version {driver.version}"
        driver = self._driver_named(command.engine)
        await membership.remove(driver, drains=command.verb == "drain")
        self._urls.pop(driver.group.name, None)
        return f"{driver.group.name} has left"

    async def _add_engine(self, engine: str) -> EngineDriver:
        if engine.isdecimal():
            if self._kind is not None:
                raise UserError(f"engine {engine}: engines at an address are added by their address.")
            if any(_read_number(driver) == int(engine) for driver in self._pool.drivers):
                raise UserError(f"engine {engine} is running already.")
            return await self._pool.membership.add(self._launch(int(engine), None))
        if self._kind is None:
            raise UserError(f"{engine}: the run starts its engines itself (rollout.engine); give an engine's number.")
        if engine in self._urls.values():
            raise UserError(f"{engine} is an engine of the run already.")
        number, self._next = self._next, self._next + 1
        driver = await self._pool.membership.add(self._launch(number, engine))
        self._urls[driver.group.name] = engine
        return driver

    async def _scale_engines(self, target: str) -> str:
        """Adds engines with the lowest free numbers, or drains those that are lost and then the highest numbers."""
        drivers, membership = self._pool.drivers, self._pool.membership
        wanted, present = int(target), len(self._pool.drivers)
        if wanted < 1:
            raise UserError(f"rollout={wanted}: a run needs at least one engine.")
        if wanted > present and self._kind is not None:
            raise UserError(
                f"rollout={wanted}: engines at an address are added by their address: `interlace engines RUN add URL`. "
                f"The run has {present}."
            )
        if wanted > max(self._most_engines, present):
            raise UserError(
                f"rollout={wanted}: the devices of the placement (schedule.placement.rollout) have room for "
                f"{self._most_engines} engines. Write rollout={self._most_engines} or less."
            )
        used = {_read_number(driver) for driver in drivers}
        free = [number for number in range(self._most_engines) if number not in used][: max(0, wanted - present)]
        leaving = sorted(drivers, key=lambda driver: (driver.is_away, _read_number(driver)))[wanted:]
        await asyncio.gather(
            *(membership.add(self._launch(number, None)) for number in free),
            *(membership.remove(driver, drains=True) for driver in leaving),
        )
        for driver in leaving:
            self._urls.pop(driver.group.name, None)
        return f"the run had {present} engines and has {len(drivers)}"

    def _driver_named(self, engine: str) -> EngineDriver:
        for driver in self._pool.drivers:
            if self._urls.get(driver.group.name) == engine or str(_read_number(driver)) == engine:
                return driver
        known = ", ".join(self._urls.get(d.group.name, str(_read_number(d))) for d in self._pool.drivers)
        raise UserError(f"the run has no engine {engine}. Known: {known}.")

    async def _follow_list(self, number: int) -> None:
        """Adds servers that were added to the file of addresses or to the DNS name, and drains those that were removed.

        number: of the check, from 0.
        """
        if self._kind is None or not (self._kind.config.urls_file or self._kind.config.urls_dns):
            return
        has_dns, find = self._kind.config.urls_dns is not None, self._kind.find_changing_urls
        if has_dns and number % RESOLVE_EVERY:
            return
        try:
            listed = await asyncio.to_thread(find) if has_dns else find()
        except (UserError, OSError):
            return  # the file is being replaced, or no name server answers
        last, self._last_read = self._last_read, listed
        if listed != last:
            return  # a program that writes the file in place has emptied it first: its servers would drain
        before, self._followed = self._followed, listed
        if before is None:  # the list may have changed while the run started
            before = tuple(url for url in self._urls.values() if url not in self._kind.config.urls)
        self._retries = {url: retry for url, retry in self._retries.items() if url in listed}
        now_s = time.monotonic()
        due = {url for url, retry in self._retries.items() if retry.at_s <= now_s} if before == listed else {*listed}
        absent = [url for url in listed if url in due and url not in self._urls.values()]
        gone = [url for url in before if url not in listed and url in self._urls.values()]
        later = [url for url in self._to_drain if url not in listed and url in self._urls.values()]
        for url in absent:
            await self._add_listed(url)
        self._to_drain = tuple([url for url in later if not self._has_others(url)])
        for url in (*gone, *(url for url in later if url not in self._to_drain)):
            if not await self._change_listed(EngineCommand(verb="drain", engine=url)):
                self._to_drain = (*self._to_drain, url)

    def _has_others(self, url: str) -> bool:
        """Returns whether an engine serves besides the one at an address."""
        names = [driver.group.name for driver in self._pool.drivers if not driver.is_away]
        return any(self._urls.get(name) != url for name in names)

    async def _add_listed(self, url: str) -> None:
        """Adds a server of the file of addresses, or plans the next attempt after a pause that grows."""
        retry = self._retries.pop(url, _Retry(at_s=0.0, pause_s=FIRST_RETRY_S))
        again = f"It is tried again in {retry.pause_s:.0f} s."
        if not await self._change_listed(EngineCommand(verb="add", engine=url), again):
            pause_s = min(2 * retry.pause_s, LAST_RETRY_S)
            self._retries[url] = _Retry(at_s=time.monotonic() + retry.pause_s, pause_s=pause_s)

    async def _change_listed(self, change: EngineCommand, after_failure: str = "") -> bool:
        """Executes a change of the file of addresses, and notes its failure. Returns whether it succeeded."""
        try:
            await self.execute(change)
        except InterlaceError as error:
            self._pool.membership.notes.add(f"{change.verb} {change.engine}: {error} {after_failure}".rstrip())
            return False
        return True

    def _write_members(self) -> None:
        """Writes the numbers of the engines for later processes of the run, unless their addresses determine them."""
        if self._kind is not None:
            return
        numbers = tuple(sorted(_read_number(driver) for driver in self._pool.drivers))
        members = EngineMembers(num_places=self._most_engines, engines=numbers)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._folder / MEMBERS, members.model_dump_json())

    def _write_state(self) -> None:
        rows: list[Mapping[str, JSON]] = [
            {**asdict(state), "url": self._urls.get(state.name, "")} for state in self._pool.membership.states()
        ]
        text = json.dumps(rows)
        if text != self._written:
            self._written = text
            write_atomic(self._folder / STATE, text)


def _read_number(driver: EngineDriver) -> int:
    return int(driver.group.name.rpartition("/")[2])
