"""A server in a thread of the program."""

import asyncio
import queue
import threading
from types import TracebackType
from typing import Self

from interlace.core.errors import InterlaceError
from interlace.run.recipe.config import Recipe
from interlace.run.serve import ServeOptions, Serving
from interlace.run.serve import serve as serve_model


class Server:
    """A server in a thread of this program. It ends with `stop`, with its `with` block, or with the program."""

    def __init__(self, recipe: Recipe, options: ServeOptions) -> None:
        """Starts the server and returns when it listens. Raises the error that it could not start by."""
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: queue.SimpleQueue[Serving | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve_model, args=(recipe, options), name="server", daemon=True)
        self._thread.start()
        found = self._started.get()
        if isinstance(found, BaseException):
            raise found
        self.url, self.api_key, self.admin_key = found.url, found.api_key, found.admin_key

    def stop(self) -> None:
        """Ends the server and returns when it has ended."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve_model(self, recipe: Recipe, options: ServeOptions) -> None:
        try:
            serve_model(recipe, options, on_ready=self._on_ready, stop=self._stop)
            self._started.put(InterlaceError("the server ended before it listened."))
        except BaseException as error:  # noqa: BLE001 - the constructor raises it again
            self._started.put(error)

    def _on_ready(self, serving: Serving) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.put(serving)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{type(self).__name__} at {self.url}"
