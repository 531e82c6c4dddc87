"""Link to one server: its client on an event loop, its messages, its health, and its process if the run starts it.

A server counts as lost when it fails, hangs, or returns an invalid result. Its later messages are ignored.
"""

import asyncio
import contextlib
import itertools
import shutil
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from interlace.core.errors import DiskFullError, InterlaceError, UserError
from interlace.core.types import NO_GROUP, Request, SampleKey, SamplingParams
from interlace.engines.rollout.services.loop import LoopThread
from interlace.engines.rollout.services.process import ServerProcess
from interlace.engines.rollout.services.protocol import (
    Delta,
    EngineClient,
    LoadMode,
    ServiceCapacity,
    ServiceError,
)
from interlace.weights.ref import WeightProbe

T = TypeVar("T")
LOOK_EVERY_S = 0.25
"""Seconds between two health checks of a starting server."""
WARM_UP = SamplingParams(max_new_tokens=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSettings:
    """Limits after which a server counts as lost; see ServiceConfig."""

    heartbeat_s: float
    patience_s: float
    progress_s: float
    start_s: float
    """Seconds for a server to become ready."""
    probe_gap: float


class ServerLink:
    """Connection to one server, for callers outside the event loop's thread."""

    def __init__(
        self,
        connect: Callable[[], EngineClient],
        settings: LinkSettings,
        *,
        process: ServerProcess | None = None,
        private: Path | None = None,
    ) -> None:
        """connect: called on the event loop. process: the server's process, if the run starts it.

        private: folder that is removed when the link is closed.
        """
        self._private = private
        self._connect, self._settings, self._process = connect, settings, process
        self._loop = LoopThread("engine service client")
        self._client: EngineClient | None = None
        self.lost = ""
        """Reason why the server counts as lost; empty while it does not."""
        self._news = threading.Condition()
        self._is_interrupted = False
        self._arrivals: deque[tuple[str, Delta]] = deque()
        self._running: dict[str, int] = {}
        """Running request -> number of its submission."""
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._version: int | None = None
        """Version that the server should serve; None before the first load."""
        self._known_versions: set[int] = set()
        self._last_token_s = time.monotonic()
        self._is_loading = False

    @property
    def name(self) -> str:
        """Returns the address of the server."""
        return self._client.name if self._client else "a server"

    def open(self) -> ServiceCapacity:
        """Starts the server if the run owns it, waits until it is ready, and returns its capacity.

        Ready means that it served a warm-up request. If it fails, the link is closed. Raises ServiceError,
        OutOfMemoryError or DiskFullError.
        """
        try:
            if self._process is not None:
                self._process.start()
            return self._ready()
        except BaseException:
            self.close()
            raise

    def reconnect(self) -> None:
        """Restores a lost server: starts it again if the run owns it, and waits until it is ready."""
        if self._process is not None:
            self._process.stop(hurries=True)
            self._process.start()
        with self._news:
            self._arrivals.clear()
            self._running.clear()
        self._known_versions.clear()
        self._version = None
        self._ready()

    def _ready(self) -> ServiceCapacity:
        capacity = self._loop.run(self._wait_until_ready())
        self.lost = ""
        self._last_token_s = time.monotonic()
        self._loop.start(self._watch())
        return capacity

    async def _wait_until_ready(self) -> ServiceCapacity:
        for task in self._tasks:
            task.cancel()
        if self._client is not None:
            await self._client.close()
        client = self._client = self._connect()
        deadline = time.monotonic() + self._settings.start_s
        while True:
            if self._process is not None and (fault := self._process.fault()):
                raise fault
            try:
                async with asyncio.timeout(self._settings.patience_s):
                    await client.health()
                break
            except (ServiceError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise ServiceError(f"{client.name} is not ready: {_text(error)}") from error
            await asyncio.sleep(LOOK_EVERY_S)
        async with asyncio.timeout(max(self._settings.patience_s, self._settings.start_s)):
            if self._process is None:  # Ends requests left by an earlier run.
                await client.pause("abort")
                await client.resume()
            capacity = await client.capacity()
            if (version := (await client.health()).version) is not None:
                self._known_versions.add(version)  # Version of requests that began before the first load.
            await self._warm_up(client)
        return capacity

    async def _warm_up(self, client: EngineClient) -> None:
        request = Request(uid="warm-up", owner=SampleKey(NO_GROUP, next(self._numbers)), prompt_ids=[1], params=WARM_UP)
        deltas: list[Delta] = []
        await client.generate([request], lambda _, delta: deltas.append(delta))
        if refused := [delta.refusal for delta in deltas if delta.refusal]:
            raise UserError(f"{client.name} refused a warm-up request: {refused[0]}")
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
        token_ids = [token for delta in deltas for token in delta.token_ids]
        if not token_ids or len(logprobs) != len(token_ids):
            raise UserError(
                f"{client.name} answered a warm-up request with {len(token_ids)} token ids and {len(logprobs)} "
                "log-probs, and training needs both. Take a server with a token route, and set rollout.dialect to it."
            )

    def send(self, requests: Sequence[Request]) -> None:
        """Sends requests to the server; their deltas appear in arrivals()."""
        number = next(self._numbers)
        self._running.update((request.id, number) for request in requests)
        self._last_token_s = time.monotonic()
        self._loop.loop.call_soon_threadsafe(self._start, self._generate(requests, number))

    def is_running(self, name: str) -> bool:
        """Returns True if the server runs the request."""
        return name in self._running

    def forget(self, name: str) -> None:
        """Ignores all later deltas of a request."""
        self._running.pop(name, None)

    def arrivals(self) -> list[tuple[str, Delta]]:
        """Removes and returns the deltas that have arrived."""
        with self._news:
            found = [*self._arrivals]
            self._arrivals.clear()
        return found

    def wait(self) -> None:
        """Waits until a delta arrives, the server is lost, or interrupt() is called."""
        with self._news:
            self._news.wait_for(lambda: self._arrivals or self._is_interrupted or self.lost)
            self._is_interrupted = False

    def interrupt(self) -> None:
        """Ends the current wait(), or the next one."""
        with self._news:
            self._is_interrupted = True
            self._news.notify_all()

    def abort(self, names: Sequence[str], *, patience_s: float) -> None:
        """Ends requests at the server and waits for their last tokens."""
        self.call(lambda client: client.abort(names))
        deadline = time.monotonic() + patience_s
        with self._news:
            self._news.wait_for(
                lambda: self.lost or not any(name in self._running for name in names),
                timeout=max(0.0, deadline - time.monotonic()),
            )

    def call(self, verb: Callable[[EngineClient], Awaitable[T]]) -> T | None:
        """Calls a method of the client; returns None if the server is lost. Raises UserError for a wrong request."""
        if self.lost:
            return None

        async def run() -> T:
            assert self._client is not None
            return await verb(self._client)

        return self._wait_for_result(run())

    def load(self, folder: Path, version: int, mode: LoadMode, probe: WeightProbe | None) -> None:
        """Loads a version and checks that the server serves it.

        Raises ServiceError if it does not, UserError for weights of another shape.
        """
        if self.lost:
            raise ServiceError(self.lost)

        async def run() -> None:
            assert self._client is not None
            self._known_versions.add(version)
            await self._client.load(folder, version, mode)
            self._version = version
            health = await self._client.health()
            if health.version != version:
                raise ServiceError(f"it reports version {health.version} after version {version} was loaded")
            if probe is not None:
                await self._check_probe(probe, version)

        before = self._version
        self._is_loading = True
        try:
            self._wait_for_result(run())
        except UserError:
            self._known_versions.discard(version)
            self._version = before
            raise
        finally:
            self._is_loading = False
            self._last_token_s = time.monotonic()
        if self.lost:
            raise ServiceError(self.lost)

    async def _check_probe(self, probe: WeightProbe, version: int) -> None:
        """Compares the server's log-probs of a fixed text with the trainer's."""
        assert self._client is not None
        [found] = await self._client.score([probe.token_ids])
        gaps = [abs(one - other) for one, other in zip(found, probe.logprobs, strict=True)]
        gap = sum(gaps) / max(1, len(gaps))
        if not gap <= self._settings.probe_gap:  # True for NaN too.
            raise ServiceError(
                f"its log-probs of a fixed text differ by {gap:.3g} nats on average from the trainer's under version "
                f"{version}, and rollout.probe_gap is {self._settings.probe_gap:g}: it serves other weights"
            )

    def lose(self, reason: str) -> None:
        """Records that the server counts as lost; the first reason is kept."""
        self._loop.loop.call_soon_threadsafe(self._lose, reason)
        with self._news:
            self.lost = self.lost or reason
            self._news.notify_all()

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
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)

    def _wait_for_result(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Waits for a coroutine on the loop. If the server fails, it counts as lost and the result is None."""

        async def guarded() -> T:
            task = self._start(work)
            return await task

        try:
            return self._loop.run(guarded())
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

    async def _generate(self, requests: Sequence[Request], number: int) -> None:
        assert self._client is not None
        try:
            await self._client.generate(requests, lambda name, delta: self._take_event(name, delta, number))
        except UserError as error:
            for request in requests:
                self._take_event(request.id, Delta(refusal=str(error)), number)
        except BaseExceptionGroup as group:
            self._lose(_text(first_error(group)))
        except (ServiceError, OSError) as error:
            self._lose(_text(error))

    def _take_event(self, name: str, delta: Delta, number: int) -> None:
        if self._running.get(name) != number or self.lost:
            return  # from a withdrawn submission
        if delta.token_ids and not delta.versions:
            delta = replace(delta, versions=[(self._stamp, len(delta.token_ids))])
        wrong = [run[0] for run in (*delta.versions, *delta.all_versions) if not self._is_known(run[0])]
        if wrong:
            self._lose(f"it drew tokens with version {wrong[0]}, which was not loaded; version {self._version} was")
            return
        self._last_token_s = time.monotonic()
        with self._news:
            if delta.finish_reason is not None or delta.refusal:
                del self._running[name]
            self._arrivals.append((name, delta))
            self._news.notify_all()

    @property
    def _stamp(self) -> int:
        return 0 if self._version is None else self._version

    def _is_known(self, version: int) -> bool:
        return version in self._known_versions or self._version is None

    def _lose(self, reason: str) -> None:
        """Cancels all running work. Called on the loop."""
        if not self.lost and self._process is not None and (fault := self._process.fault()):
            reason = f"{reason} ({fault})"
        with self._news:
            self.lost = self.lost or reason
            self._news.notify_all()
        current = asyncio.current_task()
        for task in [*self._tasks]:
            if task is not current:
                task.cancel()

    async def _watch(self) -> None:
        """Checks the server's health periodically until it is lost."""
        settings, client = self._settings, self._client
        assert client is not None
        while not self.lost and client is self._client:
            await asyncio.sleep(settings.heartbeat_s)
            if self.lost or client is not self._client:
                return
            try:
                async with asyncio.timeout(settings.patience_s):
                    health = await client.health()
            except (InterlaceError, TimeoutError, OSError) as error:
                self._lose(f"{client.name} did not answer about its health: {_text(error)}")
                return
            if self._version is not None and not self._is_loading and health.version != self._version:
                self._lose(f"{client.name} reports version {health.version}, and version {self._version} was loaded")
                return
            quiet_s = time.monotonic() - self._last_token_s
            if self._running and not self._is_loading and not health.is_paused and quiet_s > settings.progress_s:
                self._lose(f"{client.name} sent no token of {len(self._running)} requests for {quiet_s:.0f} s")
                return


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first exception of a group that is not a cancellation."""
    for error in group.exceptions:
        found = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(found, asyncio.CancelledError):
            return found
    return group


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
