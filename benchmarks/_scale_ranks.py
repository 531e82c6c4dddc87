"""Ranks of `scale.py` that compute nothing, and the cluster that calls each of them over a socket.

One process has all ranks. Each rank has a connection over TCP on loopback, and speaks the protocol of ranks in separate
processes. The controller's side of the connection is the real one.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isawaitable
from subprocess import PIPE, Popen
from typing import Any

from interlace.core.progress import Progress
from interlace.core.row import RowName
from interlace.core.runs import Runs
from interlace.core.state_parts import WEIGHTS
from interlace.core.types import FinishReason, Metrics, Request, Response, RewardResult, Sample, SampleKey
from interlace.forecast.costs.workers import RIGHT, WRONG, SimulatedTrainer
from interlace.runtime.cluster import Cluster
from interlace.runtime.process.frames import CONSTRUCTION, UNAWAITED, Assembler, Call, Reply, encode
from interlace.runtime.process.rank import ProcessRank
from interlace.runtime.rank import Rank
from interlace.runtime.worker import Worker, WorkerContext, WorkerSpec, operation
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from interlace.weights.ref import UpdateMode, WeightRef

CHUNK = 1 << 20
HOST = "127.0.0.1"


class FinishingEngine(Worker):
    """Engine that generates nothing: each call ends one sequence, the oldest, with `length` tokens."""

    def __init__(self, context: WorkerContext, length: int) -> None:
        super().__init__(context)
        self._length, self._version = length, -1
        self._live: deque[Request] = deque()

    @operation(bin="generate")
    def serve(self, requests: Sequence[Request], aborts: Sequence[str], ended: Sequence[SampleKey] = ()) -> Progress:
        """Takes requests in and out, and ends one sequence."""
        del ended
        found = [self._respond(each, FinishReason.ABORTED) for each in self._live if each.id in aborts]
        self._live = deque(each for each in self._live if each.id not in aborts) if aborts else self._live
        self._live.extend(requests)
        if self._live:
            found.append(self._respond(self._live.popleft(), FinishReason.STOP))
        return Progress(responses=tuple(found), num_running=len(self._live), num_new_tokens=self._length)

    @operation(on_device=False, concurrent=True)
    def interrupt(self) -> None:
        """Does nothing: no call decodes for long."""

    @operation(bin="switch", phase="rollout")
    def abort(self) -> tuple[Response, ...]:
        """Ends all sequences, for resubmission."""
        found = tuple(self._respond(each, FinishReason.ABORTED) for each in self._live)
        self._live.clear()
        return found

    @operation(bin="weight_sync")
    def update_weights(self, ref: WeightRef, mode: UpdateMode) -> None:
        """Takes the version."""
        del mode
        self._version = ref.version

    @operation(on_device=False)
    def stop_token_ids(self) -> tuple[int, ...]:
        """Returns no ids."""
        return ()

    @operation(on_device=False)
    def engine_metrics(self) -> Metrics:
        """Returns the number of running sequences."""
        return {"num_running": float(len(self._live))}

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return 0

    def _respond(self, request: Request, reason: FinishReason) -> Response:
        count = self._length if reason == FinishReason.STOP else 0
        versions = [*Runs.of(request.generated_versions).pieces, (self._version, count)]
        zeros = Runs.repeated(0, count + len(request.generated_ids))
        return Response(
            request=request, token_ids=zeros, logprobs=zeros, versions=Runs(versions), finish_reason=reason
        )  # fmt: skip


class QuickReward(Worker):
    """Reward of 1 for every other sample."""

    @operation(bin="score", on_device=False)
    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Returns one result per sample."""
        return [RIGHT if sample.key.index % 2 else WRONG for sample in samples]


class QuickTrainer(SimulatedTrainer):
    """Trainer that takes no time. Its ranks divide the samples, as the ranks of a real trainer do."""

    async def _work(self, seconds: float) -> None:
        """Returns at once."""

    @operation(bin="train", split="samples")
    async def accumulate(self, samples: Sequence[Sample] | Sequence[RowName], prepared: bool = False) -> None:
        """Trains on nothing."""

    @operation(on_device=False, split="samples")
    async def prepare(self, samples: Sequence[Sample]) -> None:
        """Prepares nothing."""

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return 0

    @operation(on_device=False)
    def memory_parts(self) -> Mapping[str, int]:
        return {WEIGHTS: 0}


async def serve_ranks() -> None:
    """Serves ranks until the standard input ends. Prints the port first."""
    server = await asyncio.start_server(_serve_rank, HOST, 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _serve_rank(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves one rank: runs its calls in their order."""
    assembler, worker = Assembler(), None
    while received := await reader.read(CHUNK):
        view = memoryview(received)
        while view:
            count = min(len(view), len(assembler.space))
            assembler.space[:count] = view[:count]
            view = view[count:]
            for call in assembler.received(count):
                assert isinstance(call, Call)
                if call.number == CONSTRUCTION:
                    factory, context = call.args
                    worker, value = factory(context), None
                else:
                    value = getattr(worker, call.method)(*call.args, **call.kwargs)
                    value = await value if isawaitable(value) else value
                if call.number != UNAWAITED:
                    writer.writelines(encode(Reply(number=call.number, value=value)))


class LoopbackRank(ProcessRank):
    """Rank in the process of all ranks."""

    async def start(self, factory: Callable[[WorkerContext], Worker], port: int) -> None:
        """Connects and constructs the worker."""
        constructed = self.open_calls.add("__init__")
        loop = asyncio.get_running_loop()
        self._connection.transport, _ = await loop.create_connection(lambda: self._connection, HOST, port)
        call = Call(number=CONSTRUCTION, method="__init__", args=(factory, self._context))
        self._connection.write(self._encode_call(call))
        await constructed

    async def _end(self) -> None:
        """Does nothing: the process ends after all ranks."""

    async def _cause_of_death(self) -> str:
        return "(its process ended)"


class LoopbackCluster(Cluster):
    """Cluster that calls its ranks over sockets of this machine."""

    def __init__(self, devices: Sequence[Device], schedule: Schedule, *, port: int) -> None:
        super().__init__(devices, schedule, hang_after_s=600.0)
        self._port = port

    async def _start_rank(self, spec: WorkerSpec, context: WorkerContext) -> Rank:
        rank = LoopbackRank(context, self.clock, None, self._make_failure_handler(spec))
        await rank.start(spec.factory, self._port)
        return rank


@contextmanager
def rank_process() -> Iterator[int]:
    """Starts the process of the ranks. Yields its port."""
    with Popen([sys.executable, __file__], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout and process.stdin
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def make_trainer(context: WorkerContext, costs: Any) -> QuickTrainer:
    """Makes a trainer with the memory of a profile."""
    return QuickTrainer(context, costs, None)  # type: ignore[arg-type]  # no work takes time


if __name__ == "__main__":
    import _scale_ranks  # the classes that arrive in messages have this module's name

    asyncio.run(_scale_ranks.serve_ranks())
