"""The server of the live page and its content: it listens on this machine alone and only reads files."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.observe.report.device_time import DeviceTimeline, StepChoice
from interlace.observe.report.header import Entry, find_asked_steps, read_entry
from interlace.observe.report.page import (
    LIVE_SCRIPTS,
    STYLES,
    PageContent,
    embeddable_json,
    render_fixed_content,
    render_live_frame,
)
from interlace.observe.report.render import asset
from interlace.observe.report.steps import parse_choice, render_step_sections
from interlace.observe.run_data import ANSWERS_FILE, FileCache, FileState, RunData, RunReader, file_state
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_lock import is_held
from interlace.observe.run_sessions import SESSIONS_FILE

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


HOST = "127.0.0.1"
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
"""Host names of requests that are answered: a web site whose name leads to this machine cannot read the page."""
_TYPES = {"css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'self'; img-src data:; "
    "media-src data:; style-src 'self' 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class WatchServer:
    """Serves the live page of some runs, from start() to close()."""

    def __init__(self, folders: Sequence[RunFolder], step: int | None = None) -> None:
        """step: the step of the device chart and of the lanes at first; None takes the middle one."""
        self._source = ContentSource(folders, step)
        self._reading = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> str:
        """Listens and returns the address. port: 0 takes a free port. Raises UserError if the port is taken."""
        try:
            from aiohttp import web
        except ImportError:
            raise UserError("`interlace watch` needs aiohttp: pip install 'interlace[serve]'.") from None
        app = web.Application(middlewares=[web.middleware(_check_host)])
        app.router.add_get("/", self._send_page)
        app.router.add_get("/assets/{name}", _send_asset)
        app.router.add_get("/content", self._send_content)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, HOST, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(f"cannot listen on {HOST}:{port}: {error.strerror}. Choose another --port.") from error
        return f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _send_page(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        del request
        return web.Response(text=render_live_frame(self._source.title, "assets"), content_type="text/html")

    async def _send_content(self, request: "web.Request") -> "web.Response":
        """Returns the content as JSON: status 204 if the client has it already, 400 for a step that is neither a number
        nor a name, 503 if a file cannot be read.
        """
        from aiohttp import web

        chosen = request.query.get("step")
        try:
            choice = parse_choice(chosen) if chosen else None
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        try:
            async with self._reading:
                content = await asyncio.to_thread(self._source.read, choice)
        except (UserError, OSError) as error:
            return web.Response(text=str(error), status=503)
        if request.query.get("tag") == content.tag:
            return web.Response(status=204)
        return web.Response(text=content.body, content_type="application/json")


async def _check_host(request: "web.Request", handler: "Handler") -> "web.StreamResponse":
    from aiohttp import web

    if request.url.host not in LOCAL_NAMES:
        raise web.HTTPForbidden(text="This page is served to this machine alone.")
    response = await handler(request)
    response.headers.update(_HEADERS)
    return response


async def _send_asset(request: "web.Request") -> "web.Response":
    from aiohttp import web

    name = request.match_info["name"]
    if name not in (*STYLES, *LIVE_SCRIPTS):
        raise web.HTTPNotFound
    return web.Response(text=asset(name), content_type=_TYPES[name.rpartition(".")[2]])


REST = 50.0
"""The page is rebuilt at most so often that the server rests this many times as long as it worked."""

MAX_CHOICES = 16
"""Number of chosen steps whose content is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveContent:
    """The content of the page at one time."""

    tag: str
    """Digest of the body."""
    body: str
    """JSON with the tag, the title, the sections and the charts."""


class ContentSource:
    """Builds the content of the page of some runs from their files."""

    def __init__(self, folders: Sequence[RunFolder], step: int | None = None) -> None:
        """step: the step of the device chart and of the lanes at first; None takes the middle one."""
        self.folders, self._step = folders, step
        self._readers = [RunReader(folder) for folder in folders]
        self._timelines = FileCache(DeviceTimeline.read)
        self._signature: object = None
        self._alive: Sequence[bool | None] = ()
        """Result of is_held for each run when the content was built; part of the signature."""
        self._entries: Sequence[Entry] = ()
        self._fixed: PageContent | None = None
        self._contents: dict[StepChoice, LiveContent] = {}
        """Content by the chosen step, until a file changes."""
        self._next_s = 0.0

    @property
    def title(self) -> str:
        """Returns the names of the runs."""
        return ", ".join(folder.name for folder in self.folders)

    def read(self, choice: StepChoice = None) -> LiveContent:
        """Returns the content; builds it again if a file has changed and the server has rested long enough, or if a run
        has started or ended.

        choice: the step that a reader has chosen; None takes the one of this source. Raises UserError if a file of a
        run is damaged.
        """
        began_s = time.monotonic()
        choice = self._step if choice is None else choice
        alive = [is_held(folder) for folder in self.folders]
        if self._fixed is None or began_s >= self._next_s or alive != self._alive:
            signature = (alive, [_list_states(folder) for folder in self.folders])
            if self._fixed is None or signature != self._signature:
                self._entries = [self._make_entry(reader) for reader in self._readers]
                self._fixed = render_fixed_content(self._entries)
                self._contents.clear()
                self._alive, self._signature = alive, signature
        if choice not in self._contents:
            if len(self._contents) >= MAX_CHOICES:
                self._contents.clear()
            self._contents[choice] = self._build_content(self._fixed, choice)
            now_s = time.monotonic()
            self._next_s = max(self._next_s, now_s) + REST * (now_s - began_s)
        return self._contents[choice]

    def _build_content(self, fixed: PageContent, choice: StepChoice) -> LiveContent:
        sections = {**fixed.sections, **render_step_sections(self._entries, choice)}
        fields = {"title": fixed.title, "sections": sections, "charts": fixed.charts}
        tag = blake2b(embeddable_json(fields).encode(), digest_size=16).hexdigest()
        return LiveContent(tag=tag, body=embeddable_json({"tag": tag, **fields}))

    def _make_entry(self, reader: RunReader) -> Entry:
        run, folder = reader.read(), reader.folder
        timeline = self._timelines.read(folder.timeline)
        return read_entry(run, folder, timeline, state=describe_state(folder, run))


def _list_states(folder: RunFolder) -> list[FileState | None]:
    """Returns the states of the files that the page shows."""
    files = (
        folder.metrics, folder.evaluations, folder.timeline, folder.config, folder.process, folder.samples,
        folder.path / ANSWERS_FILE, folder.path / SESSIONS_FILE, folder.advice, *folder.videos.glob("*/*"),
    )  # fmt: skip
    return [file_state(path) for path in files]


def describe_state(folder: RunFolder, run: RunData) -> str:
    """Describes whether a run trains, from its files alone: running, finished, stopped, or ended without a goodbye."""
    alive = is_held(folder)
    if alive:
        return "running"
    asked = find_asked_steps(folder.config.read_text(encoding="utf-8"))
    if asked is not None and len(run.rows) >= asked:
        return "finished"
    if alive is None:
        return "stopped"
    return "ended unexpectedly: its process does not exist any more"
