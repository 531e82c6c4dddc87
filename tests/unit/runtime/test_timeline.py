"""Intervals of the timeline add up, stretches have no gap, and a recorder gets the same records as the ledger."""

from hypothesis import given
from hypothesis import strategies as st

from interlace.runtime.timeline import KeepAll, Span, Timeline, busy_seconds


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += seconds


def span(start: float, end: float = float("inf"), *, device: int = 0) -> Span:
    return Span(
        start_s=start, end_s=end, devices=(device,), group="rollout/0", rank=0, operation="serve", cause="generate",
        step=1, version=0,
    )  # fmt: skip


def test_overlapping_spans_count_once_and_only_within_the_window() -> None:
    assert busy_seconds([span(0, 2), span(1, 3), span(5, 9)], 0.5, 6) == 3.5


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))), st.integers(0, 20), st.integers(0, 20))
def test_busy_time_is_what_counting_seconds_gives(pairs: list[tuple[int, int]], low: int, high: int) -> None:
    spans = [span(min(pair), max(pair)) for pair in pairs]
    start, end = min(low, high), max(low, high)
    seconds = sum(any(each.start_s <= second < each.end_s for each in spans) for second in range(start, end))
    assert busy_seconds(spans, start, end) == seconds


def test_each_span_ends_in_one_stretch_and_is_running_in_those_before() -> None:
    timeline, recorder = Timeline(clock=Hands()), KeepAll()
    short, long = span(0), span(0)
    with timeline.record_with(recorder):
        timeline.begin(short)
        timeline.begin(long)
        timeline.end(short, 0.1, 0.9)
        first = timeline.take()
        assert (first.spans, first.running) == ([short], [long])
        assert (short.start_s, short.end_s) == (0.1, 0.9), "as the rank saw it"
        timeline.end(long, 0.0, 2.0)
        second = timeline.take()
        assert (second.spans, second.running) == ([long], [])
        last = span(3)
        timeline.begin(last)
        timeline.end(last, 3.0, 4.0)
    assert recorder.spans == [short, long, last], "what nobody took before is recorded at the end"
    timeline.begin(span(5))
    timeline.take()
    assert len(recorder.spans) == 3, "afterwards nobody listens"
