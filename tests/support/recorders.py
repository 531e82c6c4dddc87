"""Recorders for tests."""

from interlace.runtime.timeline import Records, Span


class KeepAll:
    """Every span that ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def keep(self, records: Records) -> None:
        self.spans += records.spans

    def close(self, records: Records) -> None:
        self.keep(records)
