"""metrics.jsonl: one flat JSON object per step, flushed at the end of the step."""

from collections.abc import Mapping

from interlace.observe.jsonl import to_line
from interlace.observe.loggers.base import RunInfo


class Logger:
    """Appends to the file, so that a resumed run continues at the end of its truncated file."""

    def __init__(self, info: RunInfo) -> None:
        self._file = (info.folder / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(to_line({"step": step, **metrics}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
