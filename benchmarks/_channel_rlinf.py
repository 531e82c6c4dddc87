"""RLinf's Channel as a contestant of `channel.py`. A separate module, because its worker class needs RLinf."""

import os
import time
from typing import Any

from _channel_moves import BOUND, consume, items, ping, pong, produce
from ray.cluster_utils import Cluster as Nodes
from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, Worker

os.environ.setdefault("RLINF_COMM_NET_DEVICES", "lo")


def _message(length: int, batch: int) -> Any:
    """Returns torch tensors, which RLinf moves best: of one item, or of all items stacked."""
    import numpy as np
    import torch

    rows = items(length, batch)
    if batch == 1:
        return {name: torch.from_numpy(values) for name, values in rows[0].items()}
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


class RLinfEnd(Worker):
    """One of the two processes of RLinf."""

    def __init__(self) -> None:
        super().__init__()

    def produce(self, channel: Any, length: int, batch: int, count: int) -> float:
        return produce(channel.put, _message(length, batch), count)

    def consume(self, channel: Any, count: int) -> float:
        consume(channel.get, count)
        return time.monotonic()

    def ping(self, there: Any, back: Any, length: int, count: int) -> list[float]:
        return ping(there.put, back.get, _message(length, 1), count)

    def pong(self, there: Any, back: Any, count: int) -> None:
        pong(back.put, there.get, count)


class RLinfContestant:
    """Two workers and a channel."""

    def __init__(self) -> None:
        # By default it joins any Ray that runs on the machine, with the packages and the load of that Ray.
        self._nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 4})
        os.environ["RAY_ADDRESS"] = self._nodes.address
        cluster, placement = Cluster(num_nodes=1), NodePlacementStrategy([0])
        self._first = RLinfEnd.create_group().launch(cluster, name="first", placement_strategy=placement)
        self._second = RLinfEnd.create_group().launch(cluster, name="second", placement_strategy=placement)
        self._queue = Channel.create(name="queue", maxsize=BOUND)
        self._there, self._back = Channel.create(name="there"), Channel.create(name="back")

    def throughput(self, length: int, batch: int, count: int) -> float:
        """Returns the seconds of all messages."""
        end = self._second.consume(self._queue, count)
        start = self._first.produce(self._queue, length, batch, count)
        return end.wait()[0] - start.wait()[0]

    def round_trips(self, length: int, count: int) -> list[float]:
        """Returns the seconds of each round trip."""
        other = self._second.pong(self._there, self._back, count)
        trips: list[float] = self._first.ping(self._there, self._back, length, count).wait()[0]
        other.wait()
        return trips
