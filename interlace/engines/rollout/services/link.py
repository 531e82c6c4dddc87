"""Link to one server: its client on an event loop, its messages, its health, and its process if the run starts it.

A server counts as lost when it fails, hangs, or returns an invalid result. Its later messages are ignored.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from interlace.core.errors import DiskFullError, InterlaceError, UserError
from interlace.core.tasks import LoopThread
from interlace.core.types import Request
from interlace.engines.rollout.config import ServedConfig, ServiceConfig
from interlace.engines.rollout.services.check import (
    check_probe,
    describe_error,
    run_unless_faulty,
    wait_until_healthy,
    warm_up,
)
from interlace.engines.rollout.services.inbox import DeltaInbox
from interlace.engines.rollout.services.process import ServerProcess
from interlace.engines.rollout.services.protocol import (
    Delta,
    EngineClient,
    LoadMode,
    ServiceCapacity,
    ServiceError,
    VersionSource,
)
from interlace.weights.ref import WeightProbe

ADOPT_S = 60.0
"""Seconds in which an adopted server must serve a request. It has loaded its model, so it needs less than a start."""

T = TypeVar("T")


class LoadedVersions:
    """Tracks the version that a server should serve, and those that may have sampled tokens of running requests."""

    def __init__(self) -> None:
        self.current: int | None = None
        """Version that the server should serve; None before the first load."""
        self.is_loading = False
        """True while a version is loaded."""
        self.known: set[int] = set()
        """Versions that may have sampled tokens."""

    def clear(self) -> None:
        """Forgets all versions, because the server starts again."""
        self.known.clear()
        self.current = None

    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """Surrounds the load of a version. A UserError of the block means that the server refused the version."""
        before = self.current
        self.is_loading = True
        self.known.add(version)
        try:
            yield
        except UserError:
            self.known.discard(version)
            self.current = before
            raise
        finally:
            self.is_loading = False

    def add_version(self, delta: Delta) -> Delta:
        """Adds the current version to a delta whose server does not report versions."""
        if not delta.token_ids or delta.versions:
            return delta
        return replace(delta, versions=[(self.current or 0, len(delta.token_ids))])

    def find_unknown(self, delta: Delta) -> int | None:
        """Returns the first version of a delta that was never loaded, or None."""
        if self.current is None:
            return None
        runs = (*delta.versions, *delta.all_versions)
        return next((version for version, _ in runs if version not in self.known), None)


class ServerLink:
    """Connection to one server, for callers outside the event loop's thread."""

    def __init__(
        self, connect: Callable[[], EngineClient], settings: ServiceConfig, *, process: ServerProcess | None = None
    ) -> None:
        """connect: called on the event loop. process: the server's process, if the run starts it.

        The process's folder is removed when the link is closed.
        """
        self._connect, self._settings, self._process = connect, settings, process
        self._loop = LoopThread("engine service client")
        self._client: EngineClient | None = None
        self.inbox = DeltaInbox()
        """Deltas of the requests that were sent."""
        self._versions = LoadedVersions()
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def lost(self) -> str:
        return self.inbox.lost

    @property
    def name(self) -> str:
        return self._client.name if self._client else "a server"

    def open(self) -> ServiceCapacity:
        """Starts the server if the run owns it and it does not run, waits until it is ready, and returns its capacity.

        Ready means that it served a warm-up request. If it fails, the link is closed. Raises ServiceError,
        OutOfMemoryError or DiskFullError.
        """
        try:
            if self._process is None or self._process.is_adopted:
                return self._connect_and_watch(ends_requests=True)
            self._process.start()
            return self._connect_and_watch()
        except BaseException:
            self.close()
            raise

    def reconnect(self) -> None:
        """Restores a lost server: starts it again if the run owns it, and waits until it is ready."""
        if self._process is not None:
            self._process.stop(hurries=True)
            self._process.start()
        self.inbox.clear()
        self._versions.clear()
        self._connect_and_watch(ends_requests=self._process is None)

    def _connect_and_watch(self, *, ends_requests: bool = False) -> ServiceCapacity:
        """ends_requests: ends the requests that an earlier process of the run left at the server."""
        fault = self._process.fault if self._process else lambda: None
        capacity = self._loop.run(run_unless_faulty(self._connect_client(ends_requests), fault))
        self.inbox.lost = ""
        self.inbox.note_progress()
        self._loop.start(self._watch_health())
        return capacity

    async def _connect_client(self, ends_requests: bool) -> ServiceCapacity:
        settings, patience_s = self._settings, self._settings.health_timeout_s
        start_s = settings.start_s if isinstance(settings, ServedConfig) else patience_s
        is_adopted = self._process is not None and ends_requests
        answer_s = patience_s if is_adopted else start_s
        ready_s = max(patience_s, min(ADOPT_S, start_s) if is_adopted else start_s)
        for task in self._tasks:
            task.cancel()
        if self._client is not None:
            await self._client.close()
        client = self._client = self._connect()
        await wait_until_healthy(client, start_s=answer_s, patience_s=patience_s)
        try:
            async with asyncio.timeout(ready_s):
                if ends_requests:
                    await _take_over(client, self._process)
                capacity = await client.capacity()
                if (version := (await client.health()).version) is not None:
                    self._versions.known.add(version)  # Version of requests that began before the first load.
                await warm_up(client, next(self._numbers))
        except TimeoutError:
            raise ServiceError(f"{client.name} answers, and was not ready to serve within {ready_s:g} s") from None
        return capacity

    def send(self, requests: Sequence[Request]) -> None:
        """Sends requests to the server; their deltas appear in the inbox."""
        number = next(self._numbers)
        self.inbox.begin(requests, number)
        self._loop.loop.call_soon_threadsafe(self._start, self._generate_tokens(requests, number))

    def abort(self, names: Sequence[str], *, patience_s: float) -> None:
        """Ends requests at the server and waits for their last tokens."""
        self.call(lambda client: client.abort(names))
        self.inbox.wait_for_ends(names, patience_s=patience_s)

    def call(self, verb: Callable[[EngineClient], Awaitable[T]]) -> T | None:
        """Calls a method of the client; returns None if the server is lost. Raises UserError for a wrong request."""
        if self.lost:
            return None

        async def run() -> T:
            assert self._client is not None
            return await verb(self._client)

        return self._wait_for_result(run())

    def change_sleep(self, *, sleeps: bool) -> None:
        self.call(lambda client: _change_sleep(client, self._process, sleeps=sleeps))

    def load(self, source: VersionSource, version: int, mode: LoadMode, probe: WeightProbe | None) -> None:
        """Loads a version and checks that the server serves it.

        Raises ServiceError if it does not, UserError for weights of another shape.
        """
        if self.lost:
            raise ServiceError(self.lost)

        async def run() -> None:
            client = self._client
            assert client is not None
            await client.load(source, version, mode)
            self._versions.current = version
            health = await client.health()
            if health.version != version:
                raise ServiceError(f"it reports version {health.version} after version {version} was loaded")
            if probe is not None:
                await check_probe(client, probe, version, max_gap=self._settings.probe_gap)

        try:
            with self._versions.loading(version):
                self._wait_for_result(run())
        finally:
            self.inbox.note_progress()
        if self.lost:
            raise ServiceError(self.lost)

    def lose(self, reason: str) -> None:
        self._loop.loop.call_soon_threadsafe(self._cancel_work, reason)
        self.inbox.lose(reason)

    def close(self) -> None:
        """Closes the client, and ends the server if the run owns it."""

        async def end() -> None:
            if self._client is not None:
                await self._client.close()

        with contextlib.suppress(InterlaceError, OSError, RuntimeError):
            self._loop.run(end())
        self._loop.close()
        if self._process is not None:
            self._process.stop()
            self._process.remove_files()

    def _wait_for_result(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Waits for a coroutine on the loop. If the server fails, it counts as lost and the result is None."""

        async def await_task() -> T:
            task = self._start(work)
            return await task

        try:
            return self._loop.run(await_task())
        except (CancelledError, asyncio.CancelledError):
            return None
        except DiskFullError:
            raise
        except ServiceError as error:
            self.lose(str(error))
            return None

    def _start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _generate_tokens(self, requests: Sequence[Request], number: int) -> None:
        assert self._client is not None
        try:
            await self._client.generate(requests, lambda name, delta: self._take_event(name, delta, number))
        except UserError as error:
            for request in requests:
                self._take_event(request.id, Delta(refusal=str(error)), number)
        except BaseExceptionGroup as group:
            self._cancel_work(describe_error(first_error(group)))
        except (ServiceError, OSError) as error:
            self._cancel_work(describe_error(error))

    def _take_event(self, name: str, delta: Delta, number: int) -> None:
        if not self.inbox.accepts(name, number):
            return
        delta = self._versions.add_version(delta)
        wrong = self._versions.find_unknown(delta)
        if wrong is not None:
            loaded = self._versions.current
            self._cancel_work(f"it drew tokens with version {wrong}, which was not loaded; version {loaded} was")
            return
        self.inbox.add(name, delta)

    def _cancel_work(self, reason: str) -> None:
        """Cancels all running work. Called on the loop."""
        if not self.lost and self._process is not None and (fault := self._process.fault()):
            reason = f"{reason} ({fault})"
        self.inbox.lose(reason)
        current = asyncio.current_task()
        for task in [*self._tasks]:
            if task is not current:
                task.cancel()

    async def _watch_health(self) -> None:
        settings, client, versions = self._settings, self._client, self._versions
        assert client is not None
        while not self.lost and client is self._client:
            await asyncio.sleep(settings.heartbeat_s)
            if self.lost or client is not self._client:
                return
            try:
                async with asyncio.timeout(settings.health_timeout_s):
                    health = await client.health()
            except (InterlaceError, TimeoutError, OSError) as error:
                self._cancel_work(f"{client.name} did not answer about its health: {describe_error(error)}")
                return
            if versions.is_loading:
                continue
            if versions.current is not None and health.version != versions.current:
                self._cancel_work(
                    f"{client.name} reports version {health.version}, and version {versions.current} was loaded"
                )
                return
            num_running, quiet_s = self.inbox.num_running, self.inbox.quiet_s
            if num_running and not health.is_paused and quiet_s > settings.progress_s:
                self._cancel_work(f"{client.name} sent no token of {num_running} requests for {quiet_s:.0f} s")
                return


async def _take_over(client: EngineClient, process: ServerProcess | None) -> None:
    """Ends the requests of the process that used the server before, and drops its cached keys and values.

    Raises ServiceError if the server may sleep or be awake, and fails if it is woken while it is awake.
    """
    if process:  # a schedule with shared devices may have sent it to sleep
        if not client.wakes_awake and process.sleep_file.exists() and process.change_file.exists():
            raise ServiceError(f"{client.name} was sent to sleep or woken when its run was killed, and may be awake")
        await _change_sleep(client, process, sleeps=False)
    await client.pause("abort")
    await client.resume()


async def _change_sleep(client: EngineClient, process: ServerProcess | None, *, sleeps: bool) -> None:
    """Sends a server to sleep, or wakes it if it sleeps. Files record the state for a run that adopts the server."""
    if process is None:
        await (client.sleep() if sleeps else client.wake())
    elif sleeps:
        process.change_file.touch()
        process.sleep_file.touch()
        await client.sleep()
        process.change_file.unlink(missing_ok=True)
    elif process.sleep_file.exists():
        process.change_file.touch()
        await client.wake()
        process.sleep_file.unlink(missing_ok=True)
        process.change_file.unlink(missing_ok=True)


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first exception of a group that is not a cancellation."""
    for error in group.exceptions:
        found = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(found, asyncio.CancelledError):
            return found
    return group
