"""The torch profiler on all threads of one process, and a trace of all processes of a run that goes on meanwhile."""

import asyncio
import gzip
import os
import re
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.observe.live import TRACE_LIMIT_S, TraceFolder
from interlace.observe.progress import ProgressView
from interlace.runtime.cluster import Cluster

if TYPE_CHECKING:
    from torch.profiler import profile


class TorchTracer:
    """Records what a process computes, on a thread of its own: the profiler begins and ends on one thread."""

    def __init__(self) -> None:
        self._started, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._trace = b""
        self._thread = threading.Thread(target=self._record, name="tracer", daemon=True)

    def start(self) -> None:
        """Returns when it records."""
        self._thread.start()
        self._started.wait()
        self._raise()

    def stop(self) -> bytes:
        """The trace: gzipped JSON in Chrome's format, which Perfetto opens."""
        self._stop.set()
        self._thread.join()
        self._raise()
        return self._trace

    def _record(self) -> None:
        try:
            profiler = _profiler()
            profiler.start()
            self._started.set()
            self._stop.wait()
            profiler.stop()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                self._trace = gzip.compress(_with_thread_names(path.read_bytes()), compresslevel=1)
        except Exception as error:  # noqa: BLE001 - raised again where the trace is asked for
            self._error = error
        finally:
            self._started.set()

    def _raise(self) -> None:
        if self._error:
            raise self._error


def _profiler() -> "profile":
    # Read when the profiler first starts: it would write two lines of its own between a run's at each trace.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))


def _with_thread_names(trace: bytes) -> bytes:
    """The profiler writes `thread 4711 (python)` of each; here it gets the name that its worker gave it."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}

    def named(match: re.Match[bytes]) -> bytes:
        name = names.get(int(match[1]))
        return match[0] if name is None else b"thread %s (%s)" % (match[1], name.encode())

    return re.sub(rb"thread (\d+) \([^)]*\)", named, trace)


class LiveTrace:
    """Traces of a running cluster, started and stopped from outside. Whatever goes wrong with one, the run goes on."""

    def __init__(self, cluster: Cluster, folder: Path, progress: ProgressView) -> None:
        """folder: see TraceFolder. Used on the event loop."""
        self._cluster, self._folder, self._progress = cluster, TraceFolder(root=folder), progress
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def toggle(self) -> None:
        """Starts a trace, or ends the one that is being taken."""
        if self._task is None or self._task.done():
            self._stop.clear()
            self._task = asyncio.get_running_loop().create_task(self._take(), name="trace")
        else:
            self._stop.set()

    async def close(self) -> None:
        """Ends and writes what is being taken."""
        self._stop.set()
        if self._task:
            await self._task

    async def _take(self) -> None:
        try:
            await self._record()
        except Exception as error:  # noqa: BLE001 - whoever looks on must not end what is looked at
            self._folder.clear()
            self._progress.say(f"profile: no trace, {type(error).__name__}: {error}")

    async def _record(self) -> None:
        number = self._folder.next_number()
        await self._cluster.start_trace(TorchTracer)
        unfinished, finished = self._folder.unfinished(number), self._folder.finished(number)
        unfinished.mkdir(parents=True, exist_ok=True)
        self._progress.say(f"profile: tracing every process, until the next SIGUSR1 or for {TRACE_LIMIT_S:.0f} s")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), TRACE_LIMIT_S)
        traces = await self._cluster.stop_trace()
        for process, trace in traces.items():
            name = re.sub(r"[^A-Za-z0-9]+", "-", process).strip("-")
            await asyncio.to_thread((unfinished / f"{name}.json.gz").write_bytes, trace)
        unfinished.rename(finished)
        self._progress.say(f"profile: {len(traces)} traces in {finished} (open in ui.perfetto.dev)")
