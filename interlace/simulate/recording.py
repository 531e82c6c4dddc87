"""What a run did and when, read back from its folder, and workers that do it again on the virtual clock."""

import asyncio
import json
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from interlace.core.errors import UserError
from interlace.core.runs import Runs
from interlace.core.training import WeightBundle
from interlace.core.types import (
    JSON,
    FinishReason,
    Metrics,
    Progress,
    Request,
    Response,
    RewardResult,
    Sample,
    SampleKey,
)
from interlace.observe.run_folder import RunFolder
from interlace.observe.transcripts import read_transcripts
from interlace.runtime.group import Ran, Rank
from interlace.runtime.trace import DEVICE_PROCESS, WORKER_PROCESS, names_of
from interlace.runtime.worker import Worker, WorkerContext, operation
from interlace.simulate.rollout import response_of

Call = tuple[str, str, tuple[JSON, ...]]
"""(group, operation, samples it was given)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """A sample left an engine."""

    place: int
    """In the order of all of them; several end with one call."""
    end_s: float
    num_tokens: int
    reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One run. Times are its own clock's seconds."""

    num_devices: int
    ends: Mapping[Call, "deque[float]"]
    """When each call ended, in order; those that serve are apart."""
    serves: Mapping[str, Sequence[float]]
    """When each call of an engine ended, in order."""
    finished: Mapping[SampleKey, "deque[Finish]"]
    """A sample with a token budget finishes more than once."""
    completion_order: Sequence[SampleKey]
    uids: Mapping[int, str]
    """Group -> its prompt."""
    rewards: Mapping[SampleKey, RewardResult]

    @classmethod
    def read(cls, folder: RunFolder) -> "Recording":
        """Raises UserError where the run left no timeline, or one that cannot be read."""
        events = _events(folder)
        tracks = {
            (event["pid"], event["tid"]): str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        ends: dict[Call, deque[float]] = defaultdict(deque)
        serves: dict[str, list[float]] = defaultdict(list)
        finishes: list[tuple[float, SampleKey, int, FinishReason]] = []
        for event, end_s in _calls(events):
            group = tracks[WORKER_PROCESS, event["tid"]].partition(" rank ")[0]
            operation_name = event["name"].partition(".")[2]
            if operation_name == "serve":
                serves[group].append(end_s)
            else:
                ends[group, operation_name, tuple(event["args"].get("samples", ()))].append(end_s)
            for gid, index, num_tokens, reason in event["args"].get("finished", ()):
                finishes.append((end_s, SampleKey(gid, index), num_tokens, FinishReason(reason)))
        finishes.sort(key=lambda entry: entry[0])
        finished: dict[SampleKey, deque[Finish]] = defaultdict(deque)
        for place, (end_s, key, num_tokens, reason) in enumerate(finishes):
            finished[key].append(Finish(place=place, end_s=end_s, num_tokens=num_tokens, reason=reason))
        rows: Sequence[Mapping[str, Any]] = read_transcripts(folder.samples)
        return cls(
            num_devices=sum(process == DEVICE_PROCESS for process, _ in tracks),
            ends=ends,
            serves=serves,
            finished=finished,
            completion_order=[key for _, key, _, _ in finishes],
            uids={int(row["group"]): str(row["uid"]) for row in rows},
            rewards={SampleKey(int(row["group"]), int(row["index"])): _reward(row) for row in rows},
        )


def _events(folder: RunFolder) -> list[dict[str, Any]]:
    try:
        text = folder.timeline.read_text(encoding="utf-8").rstrip()
    except OSError as error:
        raise UserError(
            f"{folder.path} has no {folder.timeline.name}: was it run with logging.timeline=false?"
        ) from error
    try:
        # A run that was killed leaves out the closing bracket, as the format allows.
        found: list[dict[str, Any]] = json.loads(text if text.endswith("]") else text.rstrip(",") + "]")
    except json.JSONDecodeError as error:
        raise UserError(f"{folder.timeline} cannot be read: {error}") from error
    return found


def _calls(events: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """(call of a worker, when it ended), in order of their beginnings."""
    workers = [event for event in events if event["pid"] == WORKER_PROCESS]
    beside = {(event["cat"], event["id"]): event["ts"] for event in workers if event["ph"] == "e"}
    calls = [(event, (event["ts"] + event["dur"]) / 1e6) for event in workers if event["ph"] == "X"]
    calls += [(event, beside[event["cat"], event["id"]] / 1e6) for event in workers if event["ph"] == "b"]
    return sorted(calls, key=lambda call: float(call[0]["ts"]))


def _reward(row: Mapping[str, Any]) -> RewardResult:
    if row["reward"] is None:
        return RewardResult(failure=str(row.get("reason", "not scored")))
    return RewardResult(reward=float(row["reward"]))


class ReplayedRank:
    """Lets each call end when it ended in the recording; serving, and what is not in it, take their own time."""

    def __init__(self, rank: Rank, context: WorkerContext, recording: Recording) -> None:
        self._rank, self._group, self._recording = rank, context.group, recording

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        """As recorded."""
        ran = await self._rank.call(method, args, kwargs)
        if method == "serve":
            return ran
        given = names_of(args[0]) if args and isinstance(args[0], Sequence) else []
        ends = self._recording.ends.get((self._group, method, tuple(given)))
        if not ends:
            return ran
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, ends.popleft() - loop.time()))
        return ran._replace(end_s=loop.time())

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """At once."""
        self._rank.call_now(method, args)

    async def close(self) -> None:
        """Ends the worker."""
        await self._rank.close()


@dataclass(slots=True, eq=False, kw_only=True)
class _Pending:
    request: Request
    version: int
    """When it came in."""


class ReplayedEngine(Worker):
    """Finishes each sample when it was finished in the recording, with as many tokens."""

    def __init__(self, context: WorkerContext, recording: Recording) -> None:
        super().__init__(context)
        self._recording, self._version = recording, -1
        self._pending: dict[str, _Pending] = {}
        self._changed: asyncio.Future[None] | None = None

    async def serve(self, submissions: Sequence[Request], aborts: Sequence[str]) -> Progress:
        """Until the next sample was finished, or interrupt() comes."""
        responses = [_aborted(self._pending.pop(each).request) for each in aborts if each in self._pending]
        for request in submissions:
            self._pending[request.id] = _Pending(request=request, version=self._version)
        if self._pending:
            await self._sleep_until(min(self._next_end(), *(self._due(each)[0] for each in self._pending.values())))
        now = asyncio.get_running_loop().time() + 1e-9
        done = [pending for pending in self._pending.values() if self._due(pending)[0] <= now]
        responses += [self._finish(pending) for pending in sorted(done, key=self._due)]
        return Progress(responses=tuple(responses), num_running=len(self._pending))

    @operation(on_device=False, concurrent=True)
    def interrupt(self) -> None:
        """Lets a serve() that runs return, when the recorded one did: a decode step that was begun is finished."""
        if self._changed and self._next_end() == math.inf:
            _wake(self._changed)

    async def abort(self) -> tuple[Response, ...]:
        """Ends everything; how far each had come was not recorded."""
        pending, self._pending = self._pending, {}
        return tuple(_aborted(each.request) for each in pending.values())

    async def update_weights(self, bundle: WeightBundle, mode: Literal["keep", "recompute"]) -> None:
        """Another version serves."""
        del mode
        self._version = bundle.version

    @operation(on_device=False)
    def stop_token_ids(self) -> tuple[int, ...]:
        """None."""
        return ()

    @operation(on_device=False)
    def engine_metrics(self) -> Metrics:
        """Nothing is counted."""
        return {}

    def offload(self, kv: Literal["offload", "recompute"] = "offload") -> None:
        """Nothing to move."""

    def _next_end(self) -> float:
        """When the call that goes on now ended."""
        ends = self._recording.serves.get(self.context.group, ())
        place = bisect_right(ends, asyncio.get_running_loop().time() + 1e-9)
        return ends[place] if place < len(ends) else math.inf

    def _due(self, pending: _Pending) -> tuple[float, int]:
        """(when, place among all). A sample that was never finished is waited for without end."""
        finishes = self._recording.finished.get(pending.request.key)
        return (finishes[0].end_s, finishes[0].place) if finishes else (math.inf, 0)

    async def _sleep_until(self, at_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._changed = changed = loop.create_future()
        timer = loop.call_at(max(at_s, loop.time()), _wake, changed) if at_s < math.inf else None
        await changed
        if timer:
            timer.cancel()

    def _finish(self, pending: _Pending) -> Response:
        request = pending.request
        del self._pending[request.id]
        finish = self._recording.finished[request.key].popleft()
        num_new = max(0, finish.num_tokens - len(request.generated_ids))
        versions = [*Runs.of(request.generated_versions).pieces, (pending.version, num_new)]
        return response_of(request, versions, finish.reason)


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _aborted(request: Request) -> Response:
    return response_of(request, Runs.of(request.generated_versions).pieces, FinishReason.ABORTED)


class ReplayedReward(Worker):
    """Gives each sample the reward it got."""

    def __init__(self, context: WorkerContext, recording: Recording) -> None:
        super().__init__(context)
        self._rewards = recording.rewards

    @operation(on_device=False)
    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Raises UserError for a sample that the recording does not have."""
        missing = [sample.key for sample in samples if sample.key not in self._rewards]
        if missing:
            raise UserError(f"the replay came to samples {missing}, which the recording does not have")
        return [self._rewards[sample.key] for sample in samples]
