"""A server in a thread of the program."""

import asyncio
import contextlib
import queue
import threading
from pathlib import Path
from typing import Self

from interlace.core.errors import InterlaceError
from interlace.run.recipe.config import Recipe
from interlace.run.serve import ServeOptions, Serving
from interlace.run.serve import serve as serve_model
from interlace.run.serve_policy import PolicyOptions, serve_policy


class Server:
    """A server in a thread of this program. It ends with `stop`, with its `with` block, or with the program."""

    def __init__(self, source: Recipe | Path, options: ServeOptions) -> None:
        """Starts the server and returns when it listens. Raises the error that it could not start by.

        source: recipe with the model to serve; with PolicyOptions, also the folder of a published policy.
        """
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: queue.SimpleQueue[Serving | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        """Error that ended the server."""
        self._thread = threading.Thread(target=self._serve_model, args=(source, options), name="server", daemon=True)
        self._thread.start()
        found = self._started.get()
        if isinstance(found, BaseException):
            raise found
        self.url, self.api_key, self.admin_key = found.url, found.api_key, found.admin_key

    def stop(self) -> None:
        """Ends the server and returns when it has ended. Raises the error that has ended it before."""
        self._end()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _end(self) -> None:
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop has closed
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve_model(self, source: Recipe | Path, options: ServeOptions) -> None:
        try:
            if isinstance(options, PolicyOptions):
                serve_policy(source, options, on_ready=self._on_ready, stop=self._stop)
            elif isinstance(source, Recipe):
                serve_model(source, options, on_ready=self._on_ready, stop=self._stop)
            self._started.put(InterlaceError("the server ended before it listened."))
        except BaseException as error:  # noqa: BLE001 - the constructor or stop() raises it again
            self._failure = error
            self._started.put(error)

    def _on_ready(self, serving: Serving) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.put(serving)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:  # the error of the block is shown
            self._end()

    def __repr__(self) -> str:
        return f"{type(self).__name__} at {self.url}"
