"""Ledger of device-seconds: assigns the timeline's spans and the lock's claims to bins."""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter

from interlace.observe.goodput import BINS, Ledger
from interlace.runtime.decode_curve import DecodeCurve
from interlace.runtime.device_lock import DeviceLock, Hold
from interlace.runtime.timeline import EngineCall, Records, Span, by_device
from interlace.runtime.worker import OPERATION_BINS

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns disjoint intervals in order that cover the same points."""
    merged: list[Interval] = []
    reach = -math.inf
    for low, high in sorted(intervals):
        if high <= reach or high <= low:
            continue
        if merged and low <= reach:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
        reach = high
    return merged


def without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Returns the parts of `intervals` that `taken` does not cover. Both must be disjoint and in order."""
    left: list[Interval] = []
    place = 0
    for low, high in intervals:
        while place < len(taken) and taken[place][1] <= low:
            place += 1
        at = low
        following = place
        while following < len(taken) and taken[following][0] < high:
            start, end = taken[following]
            if start > at:
                left.append((at, start))
            at = max(at, end)
            following += 1
        if at < high:
            left.append((at, high))
    return left


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Returns the intersection of two lists of intervals. Both must be disjoint and in order."""
    return without(first, without(first, second))


def fill(window: Interval, layers: Sequence[tuple[str, Iterable[Interval]]]) -> dict[str, float]:
    """Returns the seconds of a window by bin. Each point counts for the first layer that covers it, else as `idle`."""
    free = [window] if window[1] > window[0] else []
    free_s = _sum_lengths(free)
    seconds = dict.fromkeys(BINS, 0.0)
    for name, intervals in layers:
        inside = _clip_intervals(intervals, window)
        if not inside:
            continue
        free = without(free, union(inside))
        before_s, free_s = free_s, _sum_lengths(free)
        seconds[name] += max(0.0, before_s - free_s)
    seconds["idle"] += free_s
    return seconds


class LedgerBuilder:
    """Builder of one ledger for each stretch of a run. Each device-second is in exactly one of them."""

    def __init__(self, lock: DeviceLock, num_devices: int, rollout_devices: Iterable[int]) -> None:
        """rollout_devices: the devices on which an engine may generate."""
        self._lock = lock
        self._num_devices, self._rollout_devices = num_devices, frozenset(rollout_devices)
        self._start_s = 0.0
        self._curves: defaultdict[str, DecodeCurve] = defaultdict(DecodeCurve)
        self._num_dropped_tokens = 0
        self._lost_share = 0.0

    def startup(self, records: Records) -> Ledger:
        """Returns the ledger of the time before the first step."""
        self._note_calls(records)
        window = self._next_window(records)
        return Ledger(seconds=sum_bins([fill(window, [("startup", [window])])] * self._num_devices))

    def step(self, records: Records, num_trained_tokens: int, num_lost_tokens: int) -> Ledger:
        """Returns the ledger of a step that ends now. The arguments count response tokens of ended samples."""
        self._note_calls(records)
        lost, self._num_dropped_tokens = num_lost_tokens + self._num_dropped_tokens, 0
        self._lost_share = lost / (lost + num_trained_tokens) if lost else 0.0
        return self._close_step(records)

    def between(self, records: Records, *, evaluated: bool) -> Ledger:
        """Returns the ledger of the time between two steps. Generation in it gets the last step's lost share.

        evaluated: whether held-out prompts were answered; if True, the engines' work does not count as generation.
        """
        self._note_calls(records)
        ledger = self._close_step(records)
        if not evaluated:
            return ledger
        bins = ("generate", "decode_underfilled", "re_prefill", "discarded")
        answering = sum(ledger.seconds[name] for name in bins)
        moved = {**dict.fromkeys(bins, 0.0), "idle": ledger.seconds["idle"] + answering}
        return Ledger(seconds={**ledger.seconds, **moved})

    def _close_step(self, records: Records) -> Ledger:
        spans, window = records.touching, self._next_window(records)
        holds = self._lock.take_holds()
        serving = union(
            _clip_intervals(((s.start_s, s.end_s) for s in spans if s.bin == "generate" and s.devices), window)
        )
        anything = union(_clip_intervals(((s.start_s, s.end_s) for s in spans), window))
        computing, filled = _find_compute_layers(spans, self._num_devices), []
        shared = [hold for hold in holds if len(hold.devices) > 1]
        busy = [union(chain.from_iterable(mine.values())) if shared else [] for mine in computing]
        waits = {id(hold): _find_waits(hold, busy) for hold in shared}
        waited = by_device(records.waits, self._num_devices)
        reserved, calls = by_device(holds, self._num_devices), by_device(records.served, self._num_devices)
        for device in range(self._num_devices):
            layers = [*computing[device].items(), *_find_reserved(reserved[device], waits, busy[device])]
            layers.append(("tool_wait", [(wait.start_s, wait.end_s) for wait in waited[device]]))
            if device in self._rollout_devices:
                layers.append(("tail_bubble", serving))
            layers.append(("pipeline_bubble", anything))
            seconds = fill(window, layers)
            self._split_generation(seconds, calls[device], window)
            filled.append(seconds)
        return Ledger(seconds=sum_bins(filled))

    def _next_window(self, records: Records) -> Interval:
        start_s, self._start_s = self._start_s, records.end_s
        return start_s, self._start_s

    def _note_calls(self, records: Records) -> None:
        self._num_dropped_tokens += records.num_dropped_tokens
        for call in records.served:
            self._curves[call.span.group].observe(call)

    def _split_generation(self, seconds: dict[str, float], served: Sequence[EngineCall], window: Interval) -> None:
        """Divides a device's serving time among the bins of generation, based on the calls that ended in the window."""
        whole = repeated = underfilled = 0.0
        start_s, end_s = window
        for call in served:
            span = call.span
            low, high = span.start_s, span.end_s
            call_s = (high if high < end_s else end_s) - (low if low > start_s else start_s)
            if call_s <= 0:
                continue  # the call ended in the previous window but was processed during this one
            tokens = call.num_new_tokens + call.num_prompt_tokens + call.num_repeated_tokens
            again = call_s * call.num_repeated_tokens / tokens if tokens else 0.0
            whole += call_s
            repeated += again
            if self._curves[span.group].is_underfilled(call.batch):
                underfilled += call_s - again
        served_s = seconds["generate"]
        if whole > 0:
            seconds["re_prefill"] = served_s * repeated / whole
            seconds["decode_underfilled"] = served_s * underfilled / whole
        full = max(0.0, served_s - seconds["re_prefill"] - seconds["decode_underfilled"])  # removes rounding errors
        seconds["discarded"] = full * self._lost_share
        seconds["generate"] = full - seconds["discarded"]


def sum_bins(devices: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums seconds over devices."""
    total = dict.fromkeys(BINS, 0.0)
    for seconds in devices:
        for name, value in seconds.items():
            total[name] += value
    return total


def _find_compute_layers(spans: Sequence[Span], num_devices: int) -> list[dict[str, list[Interval]]]:
    """Lists the layers of operations on each device.

    If operations overlap, generation and idle ones have lowest priority.
    """
    found: list[dict[str, list[Interval]]] = [{name: [] for name in OPERATION_BINS} for _ in range(num_devices)]
    for span in spans:
        if span.bin:
            for device in span.devices:
                found[device][span.bin].append((span.start_s, span.end_s))
    return found


def _find_waits(hold: Hold, busy: Sequence[Sequence[Interval]]) -> list[Interval]:
    """Returns the times in which any device computes while a group holds several. The group's other devices wait then.

    busy: for each device, the intervals in which an operation ran, disjoint and in order.
    """
    if hold.granted_s == math.inf:
        return []
    window = hold.granted_s, hold.released_s
    return common([window], union(each for device in hold.devices for each in _select_touching(busy[device], window)))


def _select_touching(intervals: Sequence[Interval], window: Interval) -> Sequence[Interval]:
    """Returns the intervals that overlap a window. The intervals must be disjoint and in order."""
    first = bisect_right(intervals, window[0], key=itemgetter(1))
    return intervals[first : bisect_left(intervals, window[1], key=itemgetter(0))]


def _find_reserved(
    mine: Sequence[Hold],
    waits: Mapping[int, Sequence[Interval]],
    busy: Sequence[Interval],
) -> list[tuple[str, Iterable[Interval]]]:
    """Returns the layers of a device that computes nothing although a group holds it or waits for it.

    mine: claims on the device. waits: for each claim on several devices, by its id(), the times when one of them
    computes and the others wait. busy: intervals in which an operation ran on this device, disjoint and in order. If a
    group never computes on a device that it holds (it has fewer threads than devices), the device is idle, not waiting.
    """
    held = [hold for hold in mine if hold.granted_s < math.inf]
    loading = [(hold.granted_s, min(hold.loaded_s, hold.released_s)) for hold in held]
    waiting = [(hold.asked_s, min(hold.granted_s, hold.released_s)) for hold in mine]
    for hold in held:
        if id(hold) in waits and _select_touching(busy, (hold.granted_s, hold.released_s)):
            waiting += waits[id(hold)]
    return [("switch", loading), ("lock_wait", waiting), ("idle", [(h.granted_s, h.released_s) for h in held])]


def _clip_intervals(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    start, end = window
    return [
        (low if low > start else start, high if high < end else end)
        for low, high in intervals
        if low < high and low < end and high > start
    ]


def _sum_lengths(intervals: Iterable[Interval]) -> float:
    return sum(high - low for low, high in intervals)
