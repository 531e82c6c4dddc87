"""Samples per second between two processes, and the round trip of one sample, against other systems' data planes.

An item is the content of a finished response: int32 token ids and float32 log-probs, `length` of each. Every contestant
moves items from a producing process to a consuming one, 1 or 64 per call. Each end waits for its call before it makes
the next (the bare actor keeps 16 in flight). A round trip goes there and back.

interlace's path is the whole path of a sample in a run: an operation of a worker returns rows, the controller opens
them in a `Channel` and leases them to an operation of the other worker. The round trip is timed at the controller, so
it contains one more call and reply than the others'. Under "references" the rows are kept by the producer
(`WorkerContext.keep`), and the consumer reads them from shared memory.

    python benchmarks/channel.py [--lengths 64 1024 16384] [--peers-python peers/bin/python] [--json channel.json]

RLinf Channel and TransferQueue run if --peers-python has them: see _channel_peers.py.
"""

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _channel_ends import End, KeptRow, Row
from _channel_moves import BOUND, WARM_UP_S

from interlace.run.clusters.ray import open_cluster
from interlace.run.recipe.sections import ClusterConfig
from interlace.runtime.channel import Channel
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.worker import WorkerSpec
from interlace.schedule.schedule import Schedule

OURS, BY_REFERENCE = "interlace Channel", "interlace, references"
HERE = ("bare Ray actor", "ray Queue", "multiprocessing.Queue")
ELSEWHERE = ("RLinf Channel", "TransferQueue")
STEP = 64
"""Items after which the timeline's records are closed, as at the end of a step. Until then the timeline keeps them."""
COLUMNS = ("key", "token_ids", "logprobs")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results of one contestant at one length."""

    contestant: str
    length: int
    items_per_s: dict[int, float]
    """Items per second, by items per call."""
    round_trip_s: float
    controller_ms: dict[int, float] = field(default_factory=dict)
    """CPU milliseconds of the controller's process per item, by items per call; interlace only."""


class Ours:
    """Two workers on the ray cluster, and channels between them."""

    def __init__(self, cluster: Cluster, producer: WorkerGroup[Any], consumer: WorkerGroup[Any]) -> None:
        self._cluster, self._producer, self._consumer = cluster, producer, consumer

    async def throughput(self, length: int, batch: int, count: int, *, keeps: bool = False) -> float:
        """Returns the seconds of `count` calls of `batch` items. keeps: the rows are references to kept contents."""
        kind, columns = (KeptRow, ("key", "content")) if keeps else (Row, COLUMNS)
        make, take = (
            (self._producer.make_kept, self._consumer.take_kept)
            if keeps
            else (self._producer.make, self._consumer.take)
        )
        channel: Channel[int, Any] = Channel("rows", kind, self._cluster.waits, max_rows=BOUND * batch)
        cursor = channel.subscribe("consumer", columns)

        async def produce() -> None:
            for number in range(count):
                rows = await make(number * batch, batch, length)
                await channel.has_room("producer")
                for row in rows:
                    channel.open(row.key, row, columns)
            channel.close()

        async def consume() -> None:
            while rows := await cursor.get(batch):
                await take(rows)
                cursor.acknowledge([row.key for row in rows])
                if (rows[-1].key + 1) % STEP == 0:
                    self._cluster.timeline.take()

        start = time.perf_counter()
        await asyncio.gather(produce(), consume())
        return time.perf_counter() - start

    async def round_trip(self, length: int) -> float:
        """Returns the seconds from the producer's call until the item is back."""
        start = time.perf_counter()
        there = await self._producer.make(0, 1, length)
        back = await self._consumer.echo(there)
        await self._producer.take(back)
        return time.perf_counter() - start


def mean(first: Sequence[Result], second: Sequence[Result]) -> list[Result]:
    """Returns the means of two measurements."""
    return [
        Result(
            contestant=one.contestant,
            length=one.length,
            items_per_s={batch: (rate + other.items_per_s[batch]) / 2 for batch, rate in one.items_per_s.items()},
            round_trip_s=(one.round_trip_s + other.round_trip_s) / 2,
            controller_ms={batch: (ms + other.controller_ms[batch]) / 2 for batch, ms in one.controller_ms.items()},
        )
        for one, other in zip(first, second, strict=True)
    ]


async def measure_ours(lengths: Sequence[int], batches: Sequence[int], seconds: float) -> list[Result]:
    """Measures interlace on a separate Ray."""
    cluster = open_cluster(ClusterConfig(backend="ray", devices="cpu:2"), Schedule())
    try:
        return await cluster.run(_measure(cluster, lengths, batches, seconds))
    finally:
        await cluster.shutdown()


async def _measure(cluster: Cluster, lengths: Sequence[int], batches: Sequence[int], seconds: float) -> list[Result]:
    ends = [
        await cluster.launch(WorkerSpec(name=name, factory=End, worker_class=End)) for name in ("producer", "consumer")
    ]
    ours = Ours(cluster, *ends)
    results = []
    end = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end:
        await ours.throughput(lengths[0], batches[0], 16)
    for length in lengths:
        trips = [await ours.round_trip(length) for _ in range(120)][20:]
        for name, move in ((OURS, ours.throughput), (BY_REFERENCE, partial(ours.throughput, keeps=True))):
            rates, spent = {}, {}
            for batch in batches:
                await move(length, batch, 8)
                count = max(16, int(seconds / (await move(length, batch, 16) / 16)))
                began_s = time.process_time()
                rates[batch] = statistics.median([count * batch / await move(length, batch, count) for _ in range(3)])
                spent[batch] = 1e3 * (time.process_time() - began_s) / (3 * count * batch)
            found = Result(
                contestant=name,
                length=length,
                items_per_s=rates,
                round_trip_s=statistics.median(trips) if name == OURS else math.nan,
                controller_ms=spent,
            )
            results.append(found)
    return results


def measure_peer(python: str, name: str, given: argparse.Namespace) -> list[Result]:
    """Measures a peer in separate processes. A peer that cannot run is omitted, with the reason on standard error."""
    script = Path(__file__).with_name("_channel_peers.py")
    numbers = ["--lengths", *map(str, given.lengths), "--batches", *map(str, given.batches)]
    command = [python, str(script), name, *numbers, "--seconds", str(given.seconds)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=given.limit)
    except subprocess.TimeoutExpired:
        print(f"{name}: not done within {given.limit:.0f} s", file=sys.stderr)
        return []
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = []
    for length in given.lengths:
        mine = [line for line in lines if line["length"] == length]
        rates = {line["batch"]: line["items_per_s"] for line in mine if "batch" in line}
        trips = [line["round_trip_s"] for line in mine if "round_trip_s" in line]
        if rates and trips:
            results.append(Result(contestant=name, length=length, items_per_s=rates, round_trip_s=trips[0]))
    return results


def table(results: Sequence[Result], lengths: Sequence[int], batches: Sequence[int]) -> str:
    """Returns one row per contestant and length; in brackets, interlace's rate divided by the contestant's."""
    ours = {result.length: result for result in results if result.contestant == OURS}
    lines = [f"{'length':>7}  {'':22}" + "".join(f"{f'{batch} a call, items/s':>26}" for batch in batches)]
    lines[0] += f"{'round trip, ms':>16}" + "".join(f"{f'controller, ms, {batch}':>22}" for batch in batches)
    for length in lengths:
        for result in (entry for entry in results if entry.length == length):
            rates = [(result.items_per_s[b], ours[length].items_per_s[b] / result.items_per_s[b]) for b in batches]
            cells = "".join(f"{rate:>17,.0f} ({ratio:5.1f}x)" for rate, ratio in rates)
            spent = "".join(f"{result.controller_ms.get(batch, math.nan):>22.4f}" for batch in batches)
            lines.append(f"{length:>7}  {result.contestant:22}{cells}{1000 * result.round_trip_s:>16.2f}{spent}")
    return "\n".join(lines)


def main() -> None:
    """Prints the table; --json keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of each measurement, of which the median of 3 counts"
    )
    parser.add_argument("--peers-python", help="a Python that has rlinf and transferqueue")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a peer may take")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    before = asyncio.run(measure_ours(given.lengths, given.batches, given.seconds))
    results: list[Result] = []
    for name in HERE:
        results += measure_peer(sys.executable, name, given)
    if given.peers_python:
        for name in ELSEWHERE:
            results += measure_peer(given.peers_python, name, given)
    # Measured before and after the others, so that a changing load of the machine favours no contestant.
    after = asyncio.run(measure_ours(given.lengths, given.batches, given.seconds))
    results = [*mean(before, after), *results]
    print(table(results, given.lengths, given.batches))
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
