"""Other ways to move samples between two processes: one contestant of `channel.py`, as a separate program.

It does not import interlace, so that a peer can run in a separate environment:

    python -m venv peers && peers/bin/pip install torch==2.13.0 transferqueue==0.1.11 "ray[default]" hydra-core
    peers/bin/pip install --no-deps rlinf==0.3.0

Prints one JSON object per line: items per second, or the round trip of one item in seconds.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _channel_moves import BOUND, WARM_UP_S, Get, Put, consume, items, ping, pong, produce, touch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RLINF_LOG_LEVEL", "WARNING")
WINDOW = 16
"""Calls in flight of the bare actor."""
FIELDS = ["token_ids", "logprobs"]


def tensors(length: int, count: int) -> Any:
    """Returns the message as a TensorDict, which TransferQueue moves."""
    import torch
    from tensordict import TensorDict

    rows = items(length, count)
    stacked = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in FIELDS}
    return TensorDict(stacked, batch_size=count)


def _mp_produce(queue: Any, results: Any, length: int, batch: int, count: int) -> None:
    results.put(produce(queue.put, items(length, batch), count))


def _mp_consume(queue: Any, results: Any, ready: Any, count: int) -> None:
    ready.set()
    results.put(consume(queue.get, count))


def _mp_pong(there: Any, back: Any, count: int) -> None:
    pong(back.put, there.get, count)


class MultiprocessingQueue:
    """Queue of the standard library."""

    def __init__(self) -> None:
        import multiprocessing

        self._mp = multiprocessing.get_context("spawn")

    def throughput(self, length: int, batch: int, count: int) -> float:
        """Returns the seconds of all messages."""
        queue, results, ready = self._mp.Queue(BOUND), self._mp.Queue(), self._mp.Event()
        consumer = self._mp.Process(target=_mp_consume, args=(queue, results, ready, count))
        producer = self._mp.Process(target=_mp_produce, args=(queue, results, length, batch, count))
        consumer.start()
        ready.wait()
        producer.start()
        start, end = sorted((results.get(), results.get()))
        producer.join()
        consumer.join()
        return end - start

    def round_trips(self, length: int, count: int) -> list[float]:
        """Returns the seconds of each round trip."""
        there, back = self._mp.Queue(), self._mp.Queue()
        other = self._mp.Process(target=_mp_pong, args=(there, back, count))
        other.start()
        trips = ping(there.put, back.get, items(length, 1), count)
        other.join()
        return trips


class Mailbox:
    """A bounded queue in a bare Ray actor."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue(BOUND)

    async def put(self, message: Any) -> None:
        await self._queue.put(message)

    async def get(self) -> Any:
        return await self._queue.get()


class RayEnd:
    """One of the two processes of a Ray contestant."""

    def __init__(self, queues: Sequence[Any]) -> None:
        self._queues = queues

    def produce(self, length: int, batch: int, count: int) -> float:
        """Sends with the queue's own put(), or with several calls of a bare actor in flight."""
        import ray

        queue, message = self._queues[0], items(length, batch)
        if hasattr(queue, "maxsize"):
            return produce(queue.put, message, count)
        start, flying = time.monotonic(), deque[Any]()
        for _ in range(count):
            flying.append(queue.put.remote(message))
            if len(flying) >= WINDOW:
                ray.get(flying.popleft())
        ray.get(list(flying))
        return start

    def consume(self, count: int) -> float:
        import ray

        queue = self._queues[0]
        if hasattr(queue, "maxsize"):
            return consume(queue.get, count)
        flying = deque(queue.get.remote() for _ in range(min(WINDOW, count)))
        for number in range(count):
            touch(ray.get(flying.popleft()))
            if number + WINDOW < count:
                flying.append(queue.get.remote())
        return time.monotonic()

    def _calls(self, queue: Any) -> tuple[Put, Get]:
        import ray

        if hasattr(queue, "maxsize"):
            return queue.put, queue.get
        return lambda message: ray.get(queue.put.remote(message)), lambda: ray.get(queue.get.remote())

    def ping(self, length: int, count: int) -> list[float]:
        return ping(self._calls(self._queues[0])[0], self._calls(self._queues[1])[1], items(length, 1), count)

    def pong(self, count: int) -> None:
        pong(self._calls(self._queues[1])[0], self._calls(self._queues[0])[1], count)


class RayContestant:
    """Ray's own Queue, or a bare actor."""

    def __init__(self, bare: bool) -> None:
        import ray

        ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        self._ray = ray
        if bare:
            queues = [ray.remote(num_cpus=0, max_concurrency=256)(Mailbox).remote() for _ in range(2)]
        else:
            from ray.util.queue import Queue

            queues = [Queue(BOUND, actor_options={"num_cpus": 0}) for _ in range(2)]
        end: Any = ray.remote(num_cpus=0)(RayEnd)
        self._first, self._second = end.remote(queues), end.remote(queues)

    def throughput(self, length: int, batch: int, count: int) -> float:
        """Returns the seconds of all messages."""
        end, start = self._second.consume.remote(count), self._first.produce.remote(length, batch, count)
        return self._ray.get(end) - self._ray.get(start)

    def round_trips(self, length: int, count: int) -> list[float]:
        """Returns the seconds of each round trip."""
        other = self._second.pong.remote(count)
        trips: list[float] = self._ray.get(self._first.ping.remote(length, count))
        self._ray.get(other)
        return trips


class TransferQueueEnd:
    """One of the two processes of TransferQueue."""

    def __init__(self) -> None:
        import torch
        import transfer_queue

        torch.set_num_threads(1)
        transfer_queue.init()
        self._client = transfer_queue.get_client()

    def _put(self, partition: str) -> Put:
        return lambda message: self._client.put(data=message, partition_id=partition)

    def _get(self, partition: str, batch: int) -> Get:
        def get() -> Any:
            while True:
                found = self._client.get_meta(
                    data_fields=FIELDS, batch_size=batch, partition_id=partition, task_name="consume"
                )
                if found.size:
                    break
                time.sleep(0.0005)
            data = self._client.get_data(found)
            self._client.clear_samples(found)
            return data

        return get

    def produce(self, partition: str, length: int, batch: int, count: int) -> float:
        return produce(self._put(partition), tensors(length, batch), count)

    def consume(self, partition: str, batch: int, count: int) -> float:
        return consume(self._get(partition, batch), count)

    def ping(self, length: int, count: int) -> list[float]:
        return ping(self._put("there"), self._get("back", 1), tensors(length, 1), count)

    def pong(self, length: int, count: int) -> None:
        get, put, message = self._get("there", 1), self._put("back"), tensors(length, 1)
        for _ in range(count):
            get()
            put(message)


class TransferQueueContestant:
    """verl's TransferQueue, with its simple storage."""

    def __init__(self) -> None:
        import ray
        import transfer_queue
        from omegaconf import OmegaConf

        ray.init(address="local", num_cpus=16, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        self._ray = ray
        backend = {"SimpleStorage": {"num_data_storage_units": 1}}
        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend}))
        end: Any = ray.remote(num_cpus=0)(TransferQueueEnd)
        self._first, self._second = end.remote(), end.remote()
        self._number = 0

    def throughput(self, length: int, batch: int, count: int) -> float:
        """Returns the seconds of all messages."""
        self._number += 1
        partition = f"part{self._number}"
        end = self._second.consume.remote(partition, batch, count)
        start = self._first.produce.remote(partition, length, batch, count)
        return self._ray.get(end) - self._ray.get(start)

    def round_trips(self, length: int, count: int) -> list[float]:
        """Returns the seconds of each round trip."""
        other = self._second.pong.remote(length, count)
        trips: list[float] = self._ray.get(self._first.ping.remote(length, count))
        self._ray.get(other)
        return trips


def warm_up(move: Callable[[], Any]) -> None:
    """Moves messages for WARM_UP_S seconds."""
    end = time.monotonic() + WARM_UP_S
    while time.monotonic() < end:
        move()


def measure(contestant: Any, lengths: Sequence[int], batches: Sequence[int], seconds: float) -> None:
    """Prints the results. The number of messages is chosen so that a measurement takes about `seconds`."""
    warm_up(lambda: contestant.throughput(lengths[0], batches[0], 16))
    for length in lengths:
        for batch in batches:
            contestant.throughput(length, batch, 8)
            per_message = contestant.throughput(length, batch, 16) / 16
            count = max(16, min(int(seconds / per_message), 50_000))
            rates = [count * batch / contestant.throughput(length, batch, count) for _ in range(3)]
            print(json.dumps({"length": length, "batch": batch, "items_per_s": statistics.median(rates)}), flush=True)
        trips = contestant.round_trips(length, 120)[20:]
        print(json.dumps({"length": length, "round_trip_s": statistics.median(trips)}), flush=True)


def _contestant(name: str) -> Any:
    if name == "multiprocessing.Queue":
        return MultiprocessingQueue()
    if name == "TransferQueue":
        return TransferQueueContestant()
    if name == "RLinf Channel":
        from _channel_rlinf import RLinfContestant

        return RLinfContestant()
    return RayContestant(bare=name == "bare Ray actor")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    measure(_contestant(given.name), given.lengths, given.batches, given.seconds)
