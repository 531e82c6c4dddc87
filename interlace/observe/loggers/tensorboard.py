"""TensorBoard event files, written with tensorboard's own writer: torch's wrapper would import torch."""

import time
from collections.abc import Mapping, Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from interlace.core.flat_settings import format_settings
from interlace.observe.loggers.base import LoggedSample, RunInfo


class Logger:
    """Logger that writes one scalar per metric, and the settings and samples as tables of the tab Text."""

    def __init__(self, info: RunInfo) -> None:
        self._writer = EventFileWriter(str(info.folder / "tensorboard"))
        if info.resumed_at is not None:
            # With a session start, TensorBoard discards the events of earlier files for this step and later ones.
            start = SessionLog(status=SessionLog.START)
            # Without a checkpoint, the evaluation before the first step is repeated too.
            first = info.resumed_at + 1 if info.resumed_at else 0
            self._add_event(Event(step=first, session_log=start))
        if info.config:
            settings = [[name, value] for name, value in format_settings(info.config).items()]
            self._add_table("settings", info.resumed_at or 0, ["setting", "value"], settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add_event(Event(step=step, summary=Summary(value=values)))
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        rows = [[each.prompt, each.response, str(each.reward), str(each.num_tokens)] for each in samples]
        self._add_table("samples", step, ["prompt", "response", "reward", "tokens"], rows)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add_table(self, tag: str, step: int, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Adds a table of texts, one row per row and one column per entry of `head`, which stands above them."""
        cells = [each.encode() for row in (head, *rows) for each in row]
        dimensions = [TensorShapeProto.Dim(size=size) for size in (len(rows) + 1, len(head))]
        tensor = TensorProto(dtype=DT_STRING, string_val=cells, tensor_shape=TensorShapeProto(dim=dimensions))
        metadata = create_summary_metadata(display_name=None, description=None)
        value = Summary.Value(tag=tag, tensor=tensor, metadata=metadata)
        self._add_event(Event(step=step, summary=Summary(value=[value])))

    def _add_event(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
