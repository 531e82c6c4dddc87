"""Adds and removes engines while a run trains, by commands in the run's folder and by a list of server addresses."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

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
STATE = "state.json"
"""File that lists the engines."""
Launch: TypeAlias = Callable[[int, str | None], Awaitable[RolloutGroup]]
"""Starts the engine of a number. The second argument is the address of its server, for an engine at an address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCommand:
    """One change of a run's engines."""

    verb: Verb
    engine: str
    """Address of a server, or the number of an engine. For the verb scale, the number of engines to have."""


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
            said = await self.carry_out(EngineCommand(**json.loads(text)))
        except (InterlaceError, TypeError, ValueError) as error:
            said = f"error: {error}"
        if file.exists():
            write_atomic(file.with_suffix(".answer"), said)
            file.unlink(missing_ok=True)
        else:
            self._pool.membership.notes.add(f"a command whose sender did not wait for it: {said}")

    async def carry_out(self, command: EngineCommand) -> str:
        """Executes a command. Returns a description of the result. Raises UserError or InterlaceError on failure."""
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
                f"rollout={wanted}: the devices of the placement have room for {self._most_engines} engines "
                "(schedule.placement.rollout)."
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
        config = self._kind.config if self._kind else None
        if self._kind is None or config is None or (config.urls_file is None and config.urls_dns is None):
            return
        if config.urls_dns is not None and number % RESOLVE_EVERY:
            return
        find = self._kind.find_changing_urls
        try:
            listed = find() if config.urls_dns is None else await asyncio.to_thread(find)
        except (UserError, OSError):
            return  # the file is being replaced, or no name server answers
        last, self._last_read = self._last_read, listed
        if listed != last:
            return  # a program that writes the file in place has emptied it first: its servers would drain
        before, self._followed = self._followed, listed
        if before is None:  # the list may have changed while the run started
            before = tuple(url for url in self._urls.values() if url not in self._kind.config.urls)
        if before == listed:
            return
        changes = [EngineCommand(verb="add", engine=url) for url in listed if url not in self._urls.values()]
        gone = [url for url in before if url not in listed and url in self._urls.values()]
        for change in (*changes, *(EngineCommand(verb="drain", engine=url) for url in gone)):
            try:
                await self.carry_out(change)
            except InterlaceError as error:
                self._pool.membership.notes.add(f"{change.verb} {change.engine}: {error}")

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
