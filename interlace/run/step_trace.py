"""Implements `logging.trace_steps`: torch's profiler over some steps of a run, in every process."""

import asyncio
import gzip
import os
import re
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.observe.progress import ProgressView
from interlace.runtime.cluster import Cluster
from interlace.runtime.process.rank import ProcessRank

if TYPE_CHECKING:
    from torch.profiler import profile


class TorchTracer:
    """Records a process on a separate thread, because the profiler must start and stop on the same thread."""

    def __init__(self) -> None:
        """Starts the recording, and returns when the profiler runs."""
        self._started, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._trace = b""
        self._thread = threading.Thread(target=self._record, name="tracer", daemon=True)
        self._thread.start()
        self._started.wait()
        self._raise()

    def stop(self) -> bytes:
        """Stops the recording. Returns it as gzipped JSON in Chrome's format, which Perfetto opens."""
        self._stop.set()
        self._thread.join()
        self._raise()
        return self._trace

    def _record(self) -> None:
        try:
            profiler = _make_profiler()
            profiler.start()
            self._started.set()
            self._stop.wait()
            profiler.stop()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                self._trace = gzip.compress(_with_thread_names(path.read_bytes()), compresslevel=1)
        except Exception as error:  # noqa: BLE001 - raised again when the trace is fetched
            self._error = error
        finally:
            self._started.set()

    def _raise(self) -> None:
        if self._error:
            raise self._error


def _make_profiler() -> "profile":
    # Read when the profiler first starts. Without it, the profiler prints two lines at each trace.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))


def _with_thread_names(trace: bytes) -> bytes:
    """Replaces thread ids by the workers' thread names, in entries such as `thread 4711 (python)`."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}

    def name_thread(match: re.Match[bytes]) -> bytes:
        name = names.get(int(match[1]))
        return match[0] if name is None else b"thread %s (%s)" % (match[1], name.encode())

    return re.sub(rb"thread (\d+) \([^)]*\)", name_thread, trace)


class StepTrace:
    """Trace of a run's steps `first` to `last`. An error of the trace does not end the run."""

    def __init__(self, cluster: Cluster, folder: Path, progress: ProgressView, steps: tuple[int, int] | None) -> None:
        """folder: folder of the traces. steps: (first, last). If None, no step is traced."""
        self._cluster, self._progress = cluster, progress
        self._first, self._last = steps or (0, 0)
        self._folder = folder / f"steps-{self._first}-{self._last}"
        self._controller: TorchTracer | None = None
        """Tracer of this process; None while no trace is recorded."""
        self._workers: list[ProcessRank] = []
        """Worker processes that are recorded too."""

    async def at(self, step: int) -> None:
        """Starts or stops the trace if due. Called at the beginning of each step."""
        if step == self._first:
            await self._run_guarded("start", self._start)
        elif step == self._last + 1:
            await self.close()

    async def close(self) -> None:
        """Stops a running trace and writes it."""
        if self._controller:
            await self._run_guarded("stop", self._write)

    async def _run_guarded(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            with self._cluster.waits.operation(who="trace", what=what):
                await work()
        except Exception as error:  # noqa: BLE001 - a failing observer must not end the run
            self._progress.say(f"trace: none of steps {self._first} to {self._last}, {type(error).__name__}: {error}")

    async def _start(self) -> None:
        self._workers = [process for process in self._cluster.processes if process.is_open]
        await asyncio.gather(*(process.call("start_trace", (TorchTracer,), {}) for process in self._workers))
        self._controller = await asyncio.to_thread(TorchTracer)

    async def _write(self) -> None:
        tracer, self._controller = self._controller, None
        assert tracer
        workers = [process for process in self._workers if process.is_open]
        results = await asyncio.gather(*(process.call("stop_trace", (), {}) for process in workers))
        traces = {process.name: result.value for process, result in zip(workers, results, strict=True)}
        traces["controller"] = await asyncio.to_thread(tracer.stop)
        self._folder.mkdir(parents=True, exist_ok=True)
        for process_name, trace in traces.items():
            name = re.sub(r"[^A-Za-z0-9]+", "-", process_name).strip("-")
            await asyncio.to_thread((self._folder / f"{name}.json.gz").write_bytes, trace)
        self._progress.say(f"trace: {len(traces)} files in {self._folder} (open in ui.perfetto.dev)")
