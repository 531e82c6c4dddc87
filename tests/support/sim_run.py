"""One policy optimization on the virtual clock, with cost workers."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from interlace.algorithms.base import Needs
from interlace.core.recovery import RecoveryConfig
from interlace.core.types import SampleKey, SamplingParams, TerminalEvent
from interlace.flows.policy import policy_optimization
from interlace.flows.run import SINGLE_TURN, PolicyRun
from interlace.flows.steps import Ended, LoopSettings, StepResult
from interlace.forecast.virtual import launch
from interlace.observe.goodput import Ledger
from interlace.rewards.shaping import ShapingConfig, SourceShaping
from interlace.rollouts.base import Episode
from interlace.rollouts.session import NO_LIMITS, SessionLimits
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.sim.loop import VirtualLoop
from interlace.runtime.timeline import NoRecorder, Recorder
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from interlace.schedule.steps import Places
from interlace.stages.admission import GroupInFlight
from interlace.stages.factory import LoopSizes, StageFactory
from tests.support.cost_workers import CostAlgorithm, Costs, CountedPrompts, RememberingActor

MakeCluster = Callable[[tuple[Device, ...], Schedule], SimCluster]
Between = Callable[[PolicyRun], Awaitable[object]]
"""Function that is called at each step boundary, as an evaluation is."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """State of a simulated run at a step boundary, from which another one continues."""

    done_steps: int
    num_groups: int
    groups: Sequence[GroupInFlight]
    prompts: CountedPrompts
    places: Places | None

    @classmethod
    def of(cls, run: PolicyRun, done_steps: int) -> "Boundary":
        assert isinstance(run.prompts, CountedPrompts)
        prompts = run.prompts.copy()
        in_flight = run.admission.in_flight()
        prompts.hand_back(in_flight.waiting)
        return cls(
            done_steps=done_steps, num_groups=run.num_groups, groups=in_flight.groups, prompts=prompts,
            places=in_flight.places,
        )  # fmt: skip


async def nothing(_run: PolicyRun) -> None:
    pass


def on_sim(devices: tuple[Device, ...], schedule: Schedule) -> SimCluster:
    return SimCluster(devices, schedule, hang_after_s=1e6)


@dataclass
class Record:
    """Record of a simulated run."""

    results: list[StepResult] = field(default_factory=list)
    events: Counter[TerminalEvent] = field(default_factory=Counter)
    ended: dict[SampleKey, TerminalEvent] = field(default_factory=dict)
    entries: list[Ended] = field(default_factory=list)
    """The same samples as `ended`, with all details."""
    trained: list[list[str]] = field(default_factory=list)
    """Uids of the prompts of each step, sorted."""
    staleness: list[float] = field(default_factory=list)
    num_stalls: int = 0
    num_opened: int = 0
    seconds: float = 0.0
    cluster: SimCluster | None = None
    ledger: Ledger | None = None
    boundary: Boundary | None = None
    """State at the end of the last step."""
    closed_s: float = 0.0
    """Time at which the last ledger was closed."""

    @property
    def minibatches(self) -> list[list[int]]:
        """The groups that the actor trained on, in order."""
        assert self.cluster is not None
        (actor,) = [group for group in self.cluster.groups if group.name.startswith("actor")]
        worker = actor.rank_set.ranks[0]._worker  # type: ignore[attr-defined]
        assert isinstance(worker, RememberingActor)
        return [list(dict.fromkeys(sample.key.gid for sample in samples)) for samples in worker.minibatches]

    def add(self, entries: Sequence[Ended]) -> None:
        self.entries += entries
        for entry in entries:
            assert entry.sample.key not in self.ended, f"{entry.sample.key} ended twice"
            self.ended[entry.sample.key] = entry.event
            assert bool(entry.reason) == (entry.event == TerminalEvent.FAILED), entry
            self.events[entry.event] += 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    prompts_per_step: int = 4
    samples_per_prompt: int = 3
    num_steps: int = 5
    num_prompts: int | None = None
    minibatches: int = 1
    epochs: int = 1
    needs: Needs = Needs(reference=True)
    costs: Costs = Costs()
    num_devices: int = 4
    device_memory: int = 100
    refill_rounds: int = 10**6
    episode: Episode = SINGLE_TURN
    limits: SessionLimits = NO_LIMITS
    recovery: RecoveryConfig = RecoveryConfig()
    shaping: ShapingConfig = ShapingConfig()


class _Observer:
    def __init__(self, run: PolicyRun, record: Record, stop_after: int | None, between: Between) -> None:
        self._run, self._record, self._stop_after, self._between = run, record, stop_after, between

    async def on_step(self, result: StepResult) -> bool:
        record = self._record
        record.boundary = Boundary.of(self._run, result.step)
        record.results.append(result)
        record.add(result.ended)
        trained = {e.sample.prompt.uid for e in result.ended if e.event == TerminalEvent.TRAINED}
        record.trained.append(sorted(trained))
        record.staleness.append(result.metrics["sched/staleness_max"])
        await self._between(self._run)
        return result.step != self._stop_after


def simulate(
    schedule: Schedule,
    work: Workload,
    *,
    stop_after: int | None = None,
    recorder: Recorder | None = None,
    make_cluster: MakeCluster = on_sim,
    between: Between = nothing,
    start: Boundary | None = None,
) -> Record:
    """Runs a workload on the virtual clock, from its start or from a boundary, to its end."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        main = _run(schedule, work, stop_after, recorder or NoRecorder(), make_cluster, between, start)
        return loop.run_until_complete(main)
    finally:
        loop.cancel_and_close()
        asyncio.set_event_loop(None)


def check(record: Record, work: Workload, bound: int) -> None:
    """Checks the invariants of every run."""
    assert max(record.staleness, default=0) <= bound, "staler than allowed"
    gids = {key.gid for key in record.ended}
    assert len(record.ended) >= len(gids) * work.samples_per_prompt, "a sample has no terminal event"
    assert record.num_opened == len(record.ended)
    uids = [uid for step in record.trained for uid in step]
    assert len(uids) == len(set(uids)), "a prompt was trained twice"
    whole = len(uids) == work.prompts_per_step * work.num_steps
    may_be_short = work.num_prompts is not None or work.refill_rounds < 10
    assert whole or may_be_short, "ended early with data left"
    assert len(record.results) == work.num_steps or work.num_prompts is not None
    for device in record.cluster.devices:
        assert record.cluster.lock.count_loaded_bytes(device.index) <= device.memory_bytes


def check_minibatches(record: Record, work: Workload, *, in_order: bool) -> None:
    """Checks that the minibatches of a step are equal slices of its groups.

    in_order: whether the slices follow the order of admission, as if admission alone determines the batch.
    """
    size = math.ceil(work.prompts_per_step / work.minibatches)
    found = iter(record.minibatches)
    for result in record.results:
        trained = sorted({e.sample.key.gid for e in result.ended if e.event == TerminalEvent.TRAINED})
        slices = [trained[start : start + size] for start in range(0, len(trained), size)] or [[]]
        mine = [next(found) for _ in slices]
        if in_order:
            assert [sorted(part) for part in mine] == slices, "not in order of admission"
        assert [len(part) for part in mine] == [len(part) for part in slices]
        assert sorted(gid for part in mine for gid in part) == trained


async def _run(
    schedule: Schedule,
    work: Workload,
    stop_after: int | None,
    recorder: Recorder,
    make_cluster: MakeCluster,
    between: Between,
    start: Boundary | None,
) -> Record:
    devices = tuple(
        Device(index=i, pool="cpu", pool_index=i, memory_bytes=work.device_memory) for i in range(work.num_devices)
    )
    cluster = make_cluster(devices, schedule)
    groups = await launch(cluster, work.needs, work.costs.roles())
    stages = StageFactory(
        cluster,
        schedule,
        LoopSizes(
            prompts_per_step=work.prompts_per_step,
            samples_per_prompt=work.samples_per_prompt,
            num_steps=work.num_steps,
            done_steps=start.done_steps if start else 0,
            minibatches=work.minibatches,
            epochs=work.epochs,
        ),
    )
    sampling = SamplingParams(max_new_tokens=work.costs.max_tokens)
    shaping = SourceShaping(default=work.shaping)
    settings = LoopSettings(sampling=sampling, limits=work.limits, recovery=work.recovery, shaping=shaping)
    record = Record(cluster=cluster)
    algorithm = CostAlgorithm(work.costs, work.needs, work.refill_rounds)
    if start:
        stages.gate.restore(start.num_groups)
    prompts = start.prompts.copy() if start else CountedPrompts(work.num_prompts)
    run = PolicyRun(cluster, stages, groups, algorithm, settings, prompts, work.episode)
    if start:
        run.admission.resumed.add(start.groups, start.places)

    async def main() -> None:
        await run.start(_Observer(run, record, stop_after, between))
        await policy_optimization(run)

    with cluster.timeline.record_with(recorder):
        await cluster.run(main())
        record.ledger, record.closed_s = run.ledger(), cluster.clock.now()
    record.seconds = cluster.clock.now()
    record.num_stalls = cluster.watchdog.num_stalls
    record.add(run.finish())
    record.num_opened = run.admission.channel.num_opened
    return record
