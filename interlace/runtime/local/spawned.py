"""A rank in a separate process of this machine, because torch.distributed has one rank per process."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from interlace.core.errors import InterlaceError, WorkerAbsentError, WorkerDiedError
from interlace.runtime.process.child import notice_end_of_run, set_process_name
from interlace.runtime.process.launch import GUARD, LocalProcess, rank_servers, spawn_context
from interlace.runtime.process.rank import GRACE_S, ProcessRank
from interlace.runtime.process.server import WorkerServer
from interlace.runtime.process.shared import SharedArrays, remove_if_left
from interlace.runtime.worker import Worker, WorkerContext

Factory = Callable[[WorkerContext], Worker]


class SpawnedRank(ProcessRank):
    """A worker in a new Python process, which always ends with this process."""

    _process: LocalProcess | BaseProcess | None = None

    async def start(self, factory: Factory, folder: Path | None, preload: Sequence[str] = ()) -> None:
        """Starts the process and constructs the worker. A UserError passes unchanged; other errors become RemoteError.

        folder: the folder of shared arrays. preload: modules that the process needs. Raises WorkerAbsentError if the
        system does not start the process, and InterlaceError if the factory cannot be sent.
        """
        ours, theirs = socket.socketpair()
        try:
            await asyncio.to_thread(self._start_process, theirs, (theirs, factory, self._context, folder), preload)
        except asyncio.CancelledError:  # the thread goes on, and kills the process that it starts
            ours.close()
            await self.close()
            raise
        except (OSError, EOFError) as error:
            ours.close()
            reason = str(error) or "the fork server ended"
            raise WorkerAbsentError(f"{self.name}: its process could not be started: {reason}.") from error
        except Exception as error:
            ours.close()
            raise InterlaceError(
                f"{self.name}: the function that makes its worker cannot be sent to another process: {error}. A "
                "group of several ranks needs a factory that can be pickled: a function of a module, not one within "
                "another."
            ) from error
        if self._closed:
            ours.close()
            raise WorkerDiedError(f"{self.name} was ended.")
        constructed = self.open_calls.add("__init__")
        loop = asyncio.get_running_loop()
        self._connection.transport, _ = await loop.create_unix_connection(lambda: self._connection, sock=ours)
        try:
            await constructed
        except BaseException:
            await self.close()
            raise

    def _start_process(self, theirs: socket.socket, arguments: tuple[object, ...], preload: Sequence[str]) -> None:
        """Starts the process, on a thread. theirs: the process's end of the connection, closed here afterwards."""
        with theirs:
            self._process = self._launch_process(arguments, preload)
            self._process_number = self.process_here = self._process.pid
        if self._closed:  # close() came before, and found no process
            self._process.kill()

    def _launch_process(self, arguments: tuple[object, ...], preload: Sequence[str]) -> LocalProcess | BaseProcess:
        """Starts the process: from a fork server with the modules, or as a new one if it uses a GPU."""
        # CUDA does not work in a fork if an import of the server has looked for GPUs.
        if preload and not any(device.startswith("cuda") for device in self._context.devices):
            return rank_servers(tuple(preload)).start(self.name, serve, arguments)
        process = spawn_context().Process(target=serve, args=arguments, name=self.name, daemon=True)
        process.start()
        return process

    async def _end(self) -> None:
        if self._process is None:  # it was never started
            return
        try:
            await asyncio.to_thread(self._process.join, GRACE_S)
        finally:  # also if cancelled: the process ignores other signals, and this one would wait for it at exit
            self._process.kill()
        await asyncio.to_thread(self._process.join)

    async def _cause_of_death(self) -> str:
        assert self._process is not None
        await asyncio.to_thread(self._process.join, GRACE_S)
        code = self._process.exitcode
        ended = "its connection broke" if code is None else f"it ended with exit code {code}"
        if code is not None and code < 0:
            ended = f"it was ended by {signal.Signals(-code).name}"
        return (
            f"(process {self._process.pid}; {ended}). If memory ran out, use smaller batches or more ranks. "
            f"If a script trains on several ranks with functions that it defines, it must start under `{GUARD}`."
        )


def serve(connection: socket.socket, factory: Factory, context: WorkerContext, folder: Path | None) -> None:
    """Runs the worker's server in its process."""
    # A terminal sends Ctrl-C to every process, and a scheduler sends SIGTERM. The controller decides when to stop.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a fork server has blocked it
    notice_end_of_run()
    set_process_name(context.group.partition("/")[0])
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    stay_on_this_machine()
    shared = SharedArrays(folder, passes_on=False) if folder else None
    # A controller that was killed cannot receive the reply.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        WorkerServer(connection, context, shared).run(factory)
    if folder:
        remove_if_left(folder)  # a controller that was killed cannot do it


def stay_on_this_machine() -> None:
    """Makes torch.distributed in this process listen on loopback only. By default it listens on the host's address."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    for library in ("GLOO", "NCCL"):
        if loopback:
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
