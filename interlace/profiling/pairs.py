"""Costs of work beside work: threads of one process share its lock, processes share cores and memory."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

from interlace.core.profile import CONTROLLER, Interference
from interlace.core.types import Request, Sample, SampleKey, SamplingParams
from interlace.flows.run import RoleGroups
from interlace.profiling.fit import Call, timed
from interlace.profiling.rollout import serve_all
from interlace.profiling.samples import score_each
from interlace.profiling.training import train_call
from interlace.recipes.config import Recipe
from interlace.runtime.cluster import Cluster
from interlace.runtime.timeline import KeepAll
from interlace.runtime.typed_group import TypedGroup
from interlace.stages.role_groups import RolloutGroup

ROUNDS = 5
IN_TURN = 2.0
"""Slowdown beside the controller, at most: threads that share a lock are served in turn. The one that never pauses here
holds it for longer than a run's, whose pieces of work are short.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BusyWorker:
    """An instance and what it does over and over; or the controller."""

    role: str
    group: TypedGroup
    """For the controller, that of the workers which it calls without end."""
    call: Call

    def may_work_beside(self, other: "BusyWorker") -> bool:
        """Returns whether both workers share no device."""
        return not set(self.group.device_indices) & set(other.group.device_indices)


async def measure_interference(
    cluster: Cluster,
    groups: RoleGroups,
    samples: Sequence[Sample],
    sampling: SamplingParams,
    recipe: Recipe,
    *,
    budget_s: float,
) -> tuple[Interference, ...]:
    """Slowdowns of each role beside each other that can work at the same time on the cluster's devices, and beside the
    controller.

    samples: of a step. Where a role has many instances all of them work, and each is charged its share.
    """
    workers = list(_workers(groups, samples, sampling, recipe))
    pairs = [
        (worker, beside)
        for worker in _one_a_role(workers)
        for role in dict.fromkeys(other.role for other in workers)
        if worker.role != CONTROLLER
        and {"rollout", CONTROLLER} & {worker.role, role}
        and (beside := [other for other in workers if other.role == role and other.may_work_beside(worker)])
    ]
    found = []
    for worker, beside in pairs:
        calls, measured = [other.call for other in beside], partial(busy, cluster, worker.group)
        ratio = await slowdown(worker.call, calls, measured, budget_s=budget_s / len(pairs))
        if beside[0].role == CONTROLLER:
            ratio = min(ratio, IN_TURN)
        each = 1 + max(0.0, ratio - 1) / len(beside)
        found.append(Interference(role=worker.role, beside=beside[0].role, slowdown=each))
    return tuple(found)


async def busy(cluster: Cluster, group: TypedGroup, call: Call) -> float:
    """Makes a call. Returns the seconds in which the group's workers computed for it: what waits for the controller to
    pass it on is not among them.
    """
    recorder = KeepAll()
    with cluster.timeline.recorded_by(recorder):
        await call()
    return sum(span.end_s - span.start_s for span in recorder.spans if span.group == group.name)


async def slowdown(
    call: Call, others: Sequence[Call], measured: Callable[[Call], Awaitable[float]] = timed, *, budget_s: float
) -> float:
    """How many times as long a call takes while the others are made over and over; measured in turns with it alone."""
    for each in (call, *others):
        await each()  # the first time is slower
    alone: list[float] = []
    beside: list[float] = []
    start_s = time.perf_counter()
    while len(beside) < ROUNDS or time.perf_counter() - start_s < budget_s / 2:
        alone.append(await measured(call))
        async with _over_and_over(others):
            beside.append(await measured(call))
        if time.perf_counter() - start_s > budget_s:
            break
    return median(beside) / median(alone)


@asynccontextmanager
async def _over_and_over(calls: Sequence[Call]) -> AsyncIterator[None]:
    is_over = False

    async def repeat(call: Call) -> None:
        while not is_over:
            await call()

    loops = [asyncio.ensure_future(repeat(call)) for call in calls]
    await asyncio.sleep(0)  # they begin
    try:
        yield
    finally:
        is_over = True
        await asyncio.gather(*loops)


def _one_a_role(workers: Sequence[BusyWorker]) -> list[BusyWorker]:
    return list({worker.role: worker for worker in reversed(workers)}.values())


def _workers(
    groups: RoleGroups, samples: Sequence[Sample], sampling: SamplingParams, recipe: Recipe
) -> Iterator[BusyWorker]:
    share = math.ceil(len(samples) / len(groups.rollout))
    for place, engine in enumerate(groups.rollout):
        mine = samples[place * share : (place + 1) * share] or samples[:share]
        yield BusyWorker(role="rollout", group=engine, call=_generate(engine, mine, sampling))
    if groups.reference:
        reference = groups.reference[0]
        yield BusyWorker(role="reference", group=reference, call=lambda: reference.logprobs(samples))
    if groups.critic:
        yield BusyWorker(role="critic", group=groups.critic, call=train_call(groups.critic, samples, recipe))
    yield BusyWorker(role="actor", group=groups.actor, call=train_call(groups.actor, samples, recipe))
    if groups.reward:
        yield BusyWorker(role=CONTROLLER, group=groups.reward, call=partial(score_each, groups.reward, samples))


def _generate(engine: RolloutGroup, samples: Sequence[Sample], sampling: SamplingParams) -> Call:
    """Makes the call of an engine's share of a step, sampled as in the step."""
    requests = [
        Request(
            uid=sample.prompt.uid,
            owner=SampleKey(sample.key.gid, sample.key.index),
            prompt_ids=sample.prompt.token_ids.tolist(),
            params=sampling,
        )
        for sample in samples
    ]
    return lambda: serve_all(engine, requests)
