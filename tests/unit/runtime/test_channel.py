"""Channels deliver each row exactly once to each reader, with correct counts even after failures."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.types import TerminalEvent
from interlace.runtime.channel import Channel, ChannelFull
from interlace.runtime.waits import LoopClock, WaitRegistry


@dataclass(frozen=True)
class Row:
    name: str
    length: int = 0
    reward: float | None = None
    note: str = ""


def make(**options: object) -> Channel[int, Row]:
    return Channel("test", Row, WaitRegistry(LoopClock(asyncio.get_running_loop())), **options)  # type: ignore[arg-type]


def on_loop(test):  # type: ignore[no-untyped-def]
    """Runs a coroutine test; the name and hypothesis' arguments stay."""

    def run(*args: object) -> None:
        asyncio.run(test(*args))

    run.__name__ = test.__name__
    return run


class Counting:
    """A reader that is called."""

    def __init__(self, on_ready: Callable[[Row], object] = lambda _row: None) -> None:
        self._on_ready = on_ready
        self.ended: list[TerminalEvent] = []

    def row_ready(self, row: Row) -> None:
        self._on_ready(row)

    def row_ended(self, row: Row, event: TerminalEvent) -> None:
        self.ended.append(event)


@on_loop
async def test_a_reader_gets_a_row_once_its_columns_are_there() -> None:
    channel = make()
    early, late = channel.subscribe("early", ["name"]), channel.subscribe("late", ["reward", "note"])
    channel.open(1, Row("a"), ["name"])
    assert [row.name for row in early.lease()] == ["a"]
    channel.put(1, {"reward": 1.0})
    assert late.num_ready == 0 and not late.exhausted
    channel.put(1, {"note": "x"})
    assert late.lease() == [Row("a", reward=1.0, note="x")]


@on_loop
async def test_each_reader_has_its_own_cursor() -> None:
    channel = make()
    first, second = channel.subscribe("first", ["name"]), channel.subscribe("second", ["name"])
    channel.open(1, Row("a"), ["name"])
    channel.open(2, Row("b"), ["name"])
    assert [row.name for row in first.lease()] == ["a", "b"]
    assert [row.name for row in second.lease(1)] == ["a"]
    assert [row.name for row in second.lease(1)] == ["b"]


@on_loop
async def test_a_row_leaves_when_every_reader_acknowledged_it() -> None:
    ended = []
    channel = make(on_end=lambda row, event: ended.append((row.name, event)))
    first, second = channel.subscribe("first", ["name"]), channel.subscribe("second", ["name"])
    channel.open(1, Row("a"), ["name"])
    first.lease()
    second.lease()
    first.acknowledge([1])
    assert len(channel) == 1
    second.acknowledge([1])
    assert len(channel) == 0 and ended == [("a", None)]


@on_loop
async def test_a_tombstone_reaches_every_reader_and_corrects_its_counts() -> None:
    channel, above = make(), Counting()
    channel.subscribe("above", ["reward"], above)
    ready, buried = channel.subscribe("ready", ["name"]), above.ended
    channel.open(1, Row("a"), ["name"])
    assert channel.end(1, TerminalEvent.FAILED)
    assert (len(channel), ready.num_ready, buried) == (0, 0, [TerminalEvent.FAILED])
    assert not channel.end(1, TerminalEvent.FILTERED), "a row ends once"
    assert not channel.put(1, {"reward": 1.0}), "a late result of an ended row is told, not an error"


@on_loop
async def test_a_reader_may_end_the_row_it_is_given() -> None:
    channel = make()
    channel.subscribe("first", ["name"], Counting(lambda _row: channel.end(1, TerminalEvent.FILTERED)))
    second = channel.subscribe("second", ["name"])
    channel.open(1, Row("a"), ["name"])
    assert (second.num_ready, len(channel)) == (0, 0)


@on_loop
async def test_get_waits_for_the_number_and_gives_the_rest_at_the_end_of_the_stream() -> None:
    channel = make()
    reader = channel.subscribe("reader", ["name"])
    waiting = asyncio.ensure_future(reader.get(2))
    channel.open(1, Row("a"), ["name"])
    await asyncio.sleep(0)
    assert not waiting.done()
    channel.open(2, Row("b"), ["name"])
    assert [row.name for row in await waiting] == ["a", "b"]
    channel.open(3, Row("c"), ["name"])
    channel.close()
    assert [row.name for row in await reader.get(2)] == ["c"]
    assert await reader.get(2) == []


@on_loop
async def test_get_waits_for_rows_that_other_stages_fill_after_the_end_of_the_source() -> None:
    channel = make()
    reader = channel.subscribe("reader", ["reward"])
    for key in range(3):
        channel.open(key, Row(str(key)), ["name"])
    channel.close()
    waiting = asyncio.ensure_future(reader.get(2))
    for key in range(3):
        channel.put(key, {"reward": 1.0})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done() == (key > 0)
    assert [row.name for row in await waiting] == ["0", "1"]
    assert [row.name for row in await reader.get(2)] == ["2"]


@on_loop
async def test_get_by_weight_takes_what_fits_and_at_least_one() -> None:
    channel = make()
    reader = channel.subscribe("reader", ["name"])
    for key, length in enumerate([5, 6, 20]):
        channel.open(key, Row(str(key), length), ["name"])

    def get(budget: int) -> list[str]:
        return [row.name for row in reader.lease(max_weight=budget, weight=lambda row: row.length)]

    assert get(11) == ["0", "1"]
    assert get(11) == ["2"]


@on_loop
async def test_a_bounded_channel_refuses_and_can_be_waited_for() -> None:
    channel = make(max_rows=1)
    reader = channel.subscribe("reader", ["name"])
    channel.open(1, Row("a"), ["name"])
    with pytest.raises(ChannelFull, match="holds 1 rows"):
        channel.open(2, Row("b"), ["name"])
    room = asyncio.ensure_future(channel.has_room("producer"))
    await asyncio.sleep(0)
    assert not room.done()
    reader.lease()
    reader.acknowledge([1])
    await room
    channel.open(2, Row("b"), ["name"])


@on_loop
async def test_a_source_a_stage_and_a_reader_make_a_pipeline() -> None:
    channel, held = make(max_rows=2), []
    reader = channel.subscribe("reader", ["reward"])

    async def source() -> AsyncIterator[tuple[int, Row]]:
        for key in range(9):
            held.append(len(channel))
            yield key, Row(f"row {key}", length=key)

    async def judge(row: Row) -> float:
        await asyncio.sleep(0)
        return row.length / 2

    stages = asyncio.gather(channel.feed(source(), ["name", "length"]), channel.fill("reward", ["length"], judge))
    found = [(key, row.name, row.reward) async for key, row in reader.rows()]
    await stages
    assert found == [(key, f"row {key}", key / 2) for key in range(9)]
    assert max(held) == 2 and not len(channel), "the source waited for room, and every row was acknowledged"


@on_loop
async def test_a_row_that_ends_while_it_is_worked_on_is_passed_over() -> None:
    channel = make()
    reader = channel.subscribe("reader", ["name"])
    for key in range(3):
        channel.open(key, Row(str(key)), ["name"])
    channel.close()
    seen = []
    async for key, _ in reader.rows():
        seen.append(key)
        channel.end(key, TerminalEvent.FAILED)
        channel.end(1, TerminalEvent.STALE)
    assert seen == [0, 2]


@on_loop
async def test_mistakes_are_named() -> None:
    channel = make()
    channel.open(1, Row("a"), ["name"])
    with pytest.raises(ValueError, match="Did you mean 'reward'"):
        channel.put(1, {"rewards": 1.0})
    channel.put(1, {"reward": 1.0})
    with pytest.raises(ValueError, match="has reward already"):
        channel.put(1, {"reward": 2.0})
    with pytest.raises(ValueError, match="has row 1 already"):
        channel.open(1, Row("a"), ["name"])
    channel.close()
    with pytest.raises(ValueError, match="too late"):
        channel.open(2, Row("b"), ["name"])


@given(st.lists(st.tuples(st.sampled_from(["open", "put", "end", "lease", "ack"]), st.integers(0, 7))))
def test_every_row_is_read_once_or_ends_by_tombstone(moves: list[tuple[str, int]]) -> None:
    asyncio.run(play(moves))


async def play(moves: list[tuple[str, int]]) -> None:
    ended: list[str] = []
    channel = make(on_end=lambda row, event: ended.append(row.name))
    reader = channel.subscribe("reader", ["reward"])
    opened: set[int] = set()
    scored: set[int] = set()
    leased: list[int] = []
    for move, key in moves:
        alive = str(key) not in ended
        if move == "open" and key not in opened:
            opened.add(key)
            channel.open(key, Row(str(key)), ["name"])
        elif move == "put" and key in opened - scored:
            assert channel.put(key, {"reward": 0.0}) == alive
            scored.add(key)
        elif move == "end" and key in opened:
            assert channel.end(key, TerminalEvent.STALE) == alive
        elif move == "lease":
            leased += [int(row.name) for row in reader.lease(key)]
        elif move == "ack":
            reader.acknowledge(leased[:key])
            del leased[:key]
    channel.close()
    rest = reader.lease()
    reader.acknowledge([*leased, *(int(row.name) for row in rest)])
    assert len(ended) == len(set(ended))
    assert {int(name) for name in ended} | (opened - scored) >= opened
    assert reader.exhausted == (not [key for key in opened - scored if str(key) not in ended])


@on_loop
async def test_a_record_with_slots_is_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Slotted:
        name: str

    with pytest.raises(ValueError, match="declare Slotted without slots"):
        Channel("test", Slotted, WaitRegistry(LoopClock(asyncio.get_running_loop())))
