"""The stage that adds columns to samples: rewards, reference log-probs, values."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from interlace.core.errors import PayloadLostError, RemoteError
from interlace.core.payload import is_lost
from interlace.core.recovery import LOST_CONTENT, SampleFailure
from interlace.core.types import Sample, TerminalEvent
from interlace.rollouts.stream import Columns, OnFailed, Stream
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import Handle, TypedGroup

G = TypeVar("G", bound=TypedGroup)
R = TypeVar("R")
NOTICED_S = 15.0
"""Seconds in which the death of a process that owned a content is noticed here after a reader has noticed it."""
POLL_S = 0.05
"""Seconds between two checks for it."""
Compute = Callable[[G, Sequence[Sample]], Handle[list[R]]]
"""Operation of a worker group, given as a function such as `RewardGroup.score`."""


class MapStage(Generic[G, R]):
    """Adds columns to rows in granules. The replicas divide each granule evenly.

    Consumes: rows of the stream. It leases them after it has its devices, because rows may end while it waits.
    Produces: the columns `writes`. A row whose result is a SampleFailure is drawn again or ends as `failed`.
    Waits for: a granule of rows, then devices.
    Released by: rows. A partial granule is released if the gate is closed and no live row is upstream, or by a stall
        (`flush`).
    """

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        replicas: Sequence[G],
        *,
        operation: Compute[G, R],
        writes: Sequence[str],
        to_columns: Callable[[R], Columns | SampleFailure],
        granule: int,
        on_failed: OnFailed,
    ) -> None:
        """operation: takes a list of Samples, returns one result each. to_columns: converts a result to columns.

        granule: number of samples that one call waits for. on_failed: called with each failed sample and the reason.
        """
        self._name, self._cluster, self._replicas = name, cluster, tuple(replicas)
        self._operation, self._writes, self._to_columns = operation, tuple(writes), to_columns
        self._granule, self._on_failed = granule, on_failed
        self._wanted = f"{granule} samples for {name}"
        self._is_attached = self._flush = False
        self._released: deque[int] = deque()

    def attach(self, stream: Stream, *, given: Callable[[Sample], R | None] | None = None) -> Stream:
        """Starts the stage on the rows of `stream`. Returns the stream of rows that have the new columns.

        given: returns the result of a row that needs no call, else None.
        """
        self._channel, self._cursor, self._given = stream.channel, stream.subscribe(self._name), given
        self._is_attached = True
        for replica in self._replicas:
            loop = self._serve(replica) if replica.devices else self._serve_concurrently(replica)
            self._cluster.spawn(loop, name=f"{self._name} {replica.name}")
        return stream.plus(*self._writes)

    def flush(self) -> bool:
        """Releases a partial granule, at a stall. Returns whether it released rows."""
        if not self._is_attached or self._flush or self._released or not self._cursor.num_ready:
            return False
        self._flush = True
        self._cursor.changed.fire()
        return True

    async def _serve(self, replica: G) -> None:
        while await self._granule_released(replica):
            async with replica.hold(self._name):
                # Leased after the wait for devices: until then other replicas may take rows, and rows may end.
                samples = self._cursor.lease(self._released.popleft()) if self._released else []
                results = await self._results(replica, samples)
            self._write(samples, results)

    async def _serve_concurrently(self, replica: G) -> None:
        name = f"{self._name} {replica.name}"
        while await self._granule_released(replica):
            samples = self._cursor.lease(self._released.popleft())
            self._cluster.spawn(self._serve_granule(replica, samples), name=name)

    async def _serve_granule(self, replica: G, samples: Sequence[Sample]) -> None:
        self._write(samples, await self._results(replica, samples, cause=self._name))

    async def _results(self, replica: G, samples: Sequence[Sample], cause: str = "") -> "Sequence[R | SampleFailure]":
        """Returns one result per sample. The call contains the samples without a given result."""
        found = [self._given(sample) for sample in samples] if self._given else [None] * len(samples)
        is_whole = found.count(None) == len(found)  # the usual case
        asked = (
            samples if is_whole else [sample for sample, result in zip(samples, found, strict=True) if result is None]
        )
        results = await self._call(replica, asked, cause) if asked else []
        if is_whole:
            return results
        rest = iter(results)
        return [next(rest) if result is None else result for result in found]

    async def _call(self, replica: G, samples: Sequence[Sample], cause: str) -> "Sequence[R | SampleFailure]":
        """Returns the result of each sample. A sample whose content is lost, before or during the call, has a failure.

        A rank that cannot read a sample fails the whole call, so the call is made again without it.
        """
        left = [sample for sample in samples if not is_lost(sample.segments)]
        results: Sequence[R | SampleFailure] = []
        try:
            if left:
                answers, _ = await replica.inline(self._operation, left, cause=cause)
                results = answers
        except (RemoteError, PayloadLostError) as error:
            if not await _is_loss(error, left):
                raise
            results = await self._call(replica, left, cause)
        if len(left) == len(samples):
            return results
        found = dict(zip([sample.key for sample in left], results, strict=True))
        return [found.get(sample.key, LOST_CONTENT) for sample in samples]

    async def _granule_released(self, replica: G) -> bool:
        while not self._released:
            ready = self._cursor.num_ready
            if ready and (ready >= self._granule or self._flush or self._cursor.starved):
                self._release(ready)
                self._cursor.changed.fire()
            elif self._cursor.exhausted:
                return False
            else:
                await self._cursor.changed.wait(who=replica.name, what=self._wanted)
        return True

    def _release(self, ready: int) -> None:
        self._flush = False
        # Packing changes the last bits of results. With granules of a whole step, two runs are equal only if samples
        # are packed in order of admission.
        self._cursor.sort_ready()
        replicas = self._replicas
        share = math.ceil(ready / len(replicas)) if replicas[0].devices else min(ready, self._granule)
        self._released.extend([share] * (ready // share))
        if ready % share:
            self._released.append(ready % share)

    def _write(self, samples: Sequence[Sample], results: "Sequence[R | SampleFailure]") -> None:
        for sample, result in zip(samples, results, strict=True):
            columns = result if isinstance(result, SampleFailure) else self._to_columns(result)
            if sample.key in self._channel and self._channel.record(sample.key).segments is not sample.segments:
                continue  # the sample was reopened during the call
            if not isinstance(columns, SampleFailure):
                self._channel.put(sample.key, columns)  # does nothing if the sample ended during the call
            elif sample.key in self._channel and not self._on_failed(sample.key, columns):
                self._channel.end(sample.key, TerminalEvent.FAILED)
        self._cursor.acknowledge([sample.key for sample in samples])


async def _is_loss(error: RemoteError | PayloadLostError, samples: Sequence[Sample]) -> bool:
    """Returns whether a call failed because the content of one of its samples is lost.

    A rank may notice the loss first: the death of the process that owned the content reaches the rank and the
    controller in two messages, in any order.
    """
    names_loss = isinstance(error, PayloadLostError) or PayloadLostError.__name__ in error.remote_traceback
    deadline_s = asyncio.get_running_loop().time() + (NOTICED_S if names_loss else 0.0)
    while not any(is_lost(sample.segments) for sample in samples):
        if asyncio.get_running_loop().time() >= deadline_s:
            return False
        await asyncio.sleep(POLL_S)
    return True
