"""Workers that do on the virtual clock what those of a recorded run did."""

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any, Literal

from interlace.core.errors import InterlaceError, UserError
from interlace.core.runs import Runs
from interlace.core.training import WeightBundle
from interlace.core.types import JSON, FloatArray, Metrics, Progress, Request, Response, RewardResult, Sample
from interlace.runtime.cluster import WorkerSpec
from interlace.runtime.group import Rank, RankResult
from interlace.runtime.sim.cluster import InlineRank, SimCluster
from interlace.runtime.trace import names_of
from interlace.runtime.worker import Worker, WorkerContext
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from interlace.simulate.recording import UNRECORDED, Left, RecordedCall, Recording
from interlace.simulate.rollout import response_of
from interlace.simulate.workers import zeros


class PartedError(InterlaceError):
    """A replay went another way than the run."""


def track_of(context: WorkerContext) -> str:
    """The name of a rank's track in a trace."""
    return f"{context.group} rank {context.rank}"


class RecordedTrack:
    """The calls of one rank, as they are made again."""

    def __init__(self, track: str, recording: Recording) -> None:
        self._track, self._recording = track, recording
        self._left: dict[str, list[RecordedCall]] = {}
        """Operation -> recorded calls that were not made so far."""

    def take(self, method: str, given: Sequence[JSON] = ()) -> RecordedCall:
        """The one made now, UNRECORDED where the recording ended before it. PartedError where the run made another."""
        if method not in self._left:
            self._left[method] = list(self._recording.calls.get((self._track, method), ()))
        left = self._left[method]
        for place, call in enumerate(left):
            # Calls that overlap may have begun in another order than they were made in.
            if place and call.start_s >= left[0].returned_s:
                break
            if list(call.given) == list(given):
                return left.pop(place)
        if not (left or self._recording.is_whole):
            return UNRECORDED
        expected = f"with {list(left[0].given)}, at {left[0].start_s:.6f} s" if left else "no more"
        raise PartedError(
            f"the replay went another way than the run at {asyncio.get_running_loop().time():.6f} s: it calls "
            f"{method} of {self._track} with {list(given)}, the run called it {expected}."
        )


async def returned(call: RecordedCall) -> None:
    """Waits until the controller takes its result in; for ever where it never did, as far as is known."""
    loop = asyncio.get_running_loop()
    turn = loop.create_future()
    if call.returned_s < math.inf:
        # Not a sleep: that would not wait at all where it is time now, and results come one at a time.
        loop.call_at(max(call.returned_s, loop.time()), turn.set_result, None)
    await turn


class ReplayedRank:
    """Gives each call's result back when the controller took it in in the recording."""

    def __init__(self, rank: Rank, context: WorkerContext, recording: Recording) -> None:
        self._rank, self._track = rank, RecordedTrack(track_of(context), recording)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        """As recorded. PartedError for a call that the run did not make."""
        recorded = self._track.take(method, names_of(args[0]) if args and isinstance(args[0], Sequence) else [])
        ran = await self._rank.call(method, args, kwargs)
        await returned(recorded)
        value = recorded.gave if method == "memory_bytes" else ran.value
        return ran._replace(value=value, end_s=asyncio.get_running_loop().time())

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """At once."""
        self._rank.call_now(method, args)

    async def close(self) -> None:
        """Ends the worker."""
        await self._rank.close()


class ReplayedEngine(Worker):
    """Each call lets go of the sequences that it let go of in the recording, with as many tokens."""

    def __init__(self, context: WorkerContext, recording: Recording) -> None:
        super().__init__(context)
        track = track_of(context)
        self._serves = iter(recording.calls.get((track, "serve"), ()))
        self._aborts = iter(recording.calls.get((track, "abort"), ()))
        self._version = -1
        self._pending: dict[tuple[int | str, int, int], tuple[Request, int]] = {}
        """Group (or uid), index and turn of a sequence -> what was asked, and the version when it came in."""

    async def serve(self, submissions: Sequence[Request], aborts: Sequence[str]) -> Progress:
        """What left."""
        del aborts  # they are among what left
        for request in submissions:
            group = request.owner.gid if request.owner.gid >= 0 else request.uid
            self._pending[group, request.owner.index, request.turn] = (request, self._version)
        recorded = next(self._serves, UNRECORDED)
        running, waiting, preempted, kv_use = recorded.engine
        return Progress(
            responses=self._let_go(recorded.left),
            num_running=running,
            num_waiting=waiting,
            num_preemptions=preempted,
            kv_use=kv_use,
        )

    def interrupt(self) -> None:
        """Nothing: the recording says when each call returned."""

    async def abort(self) -> tuple[Response, ...]:
        """Everything, as far as it had come."""
        return self._let_go(next(self._aborts, UNRECORDED).left)

    async def update_weights(self, bundle: WeightBundle, mode: Literal["keep", "recompute"]) -> None:
        """Another version serves."""
        del mode
        self._version = bundle.version

    def stop_token_ids(self) -> tuple[int, ...]:
        """None."""
        return ()

    def engine_metrics(self) -> Metrics:
        """Nothing is counted."""
        return {}

    def offload(self, kv: Literal["offload", "recompute"] = "offload") -> None:
        """Nothing to move."""

    def _let_go(self, left: Sequence[Left]) -> tuple[Response, ...]:
        return tuple(self._response(each) for each in left)

    def _response(self, left: Left) -> Response:
        request, version = self._pending.pop((left.group, left.index, left.turn))
        num_new = left.num_tokens - len(request.generated_ids)
        # Of the versions in between is not known which made how many.
        made = [(version, num_new - 1), (self._version, 1)] if num_new else []
        return response_of(request, [*Runs.of(request.generated_versions).pieces, *made], left.reason)


class ReplayedReward(Worker):
    """Gives each sample the reward it got."""

    def __init__(self, context: WorkerContext, recording: Recording) -> None:
        super().__init__(context)
        self._rewards = recording.rewards

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Nothing for what is not trained on: an evaluation's answers, a greedy baseline unless its scoring failed.

        Raises UserError for a sample that the recording does not have.
        """
        missing = [sample.key for sample in samples if _is_trained_on(sample) and sample.key not in self._rewards]
        if missing:
            raise UserError(f"the replay came to samples {missing}, which the recording does not have")
        return [self._rewards.get(sample.key, RewardResult()) for sample in samples]


def _is_trained_on(sample: Sample) -> bool:
    return sample.key.gid >= 0 and sample.key.index >= 0


class ReplayedModel(Worker):
    """Actor, critic or reference: computes nothing."""

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """[L] of each sample."""
        return zeros(samples)

    base_logprobs = values = process_rewards = logprobs

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Nothing is learned."""

    def optimizer_step(self) -> None:
        """Nothing is learned."""

    def step_metrics(self) -> Metrics:
        """Nothing is learned."""
        return {}

    def export_weights(self, version: int, *, copy: bool) -> WeightBundle:
        """A version without tensors."""
        del copy
        return WeightBundle(version=version, tensors={})

    def copy_checkpoint(self) -> None:
        """There is nothing to keep."""

    def checkpoint_bytes(self) -> int:
        """There is nothing to keep."""
        return 0


class ReplayCluster(SimCluster):
    """In place of a run's workers, those that do what they did. How each is called, its own class declares."""

    def __init__(self, schedule: Schedule, recording: Recording, *, hang_after_s: float) -> None:
        """schedule: the run's."""
        devices = [
            Device(index=index, pool="sim", pool_index=index, memory_bytes=memory_bytes)
            for index, memory_bytes in enumerate(recording.device_bytes)
        ]
        super().__init__(devices, schedule, hang_after_s=hang_after_s)
        self._recording = recording
        self._outside: dict[str, RecordedTrack] = {}

    async def _start_rank(self, spec: WorkerSpec, context: WorkerContext) -> Rank:
        role = spec.name.partition("/")[0]
        worker: Worker
        if role == "rollout":
            worker = ReplayedEngine(context, self._recording)
        elif role == "reward":
            worker = ReplayedReward(context, self._recording)
        else:
            worker = ReplayedModel(context)
        return ReplayedRank(InlineRank(worker, context), context, self._recording)

    async def outside(self, who: str, what: str, work: Coroutine[Any, Any, object]) -> None:
        """Nothing is done; it ends when it ended."""
        work.close()
        track = self._outside.setdefault(who, RecordedTrack(f"{who} rank 0", self._recording))
        await returned(track.take(what))
