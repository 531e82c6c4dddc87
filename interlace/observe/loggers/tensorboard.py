"""TensorBoard event files, written with tensorboard's own writer: torch's wrapper would import torch."""

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from interlace.observe.loggers.base import RunInfo


class Logger:
    """Logger that writes one scalar per metric."""

    def __init__(self, info: RunInfo) -> None:
        self._writer = EventFileWriter(str(info.folder / "tensorboard"))
        if info.resumed_at is not None:
            # With a session start, TensorBoard discards the events of earlier files for this step and later ones.
            start = SessionLog(status=SessionLog.START)
            self._add_event(Event(step=info.resumed_at + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add_event(Event(step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add_event(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
