"""Measures the slowdown of overlapping work: threads share their process's lock, processes share cores and memory."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median

from interlace.core.types import Request, Sample, SamplingParams
from interlace.flows.run import RoleGroups
from interlace.forecast.profile.fit import Call, time_call
from interlace.forecast.profile.rollout import find_queries, serve_all
from interlace.forecast.profile.training import train_call
from interlace.forecast.profile.types import Interference
from interlace.rollouts.role_groups import RolloutGroup
from interlace.run.recipe.config import Recipe
from interlace.runtime.typed_group import TypedGroup

ROUNDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class BusyWorker:
    """An instance and the call that it repeats."""

    role: str
    group: TypedGroup
    call: Call

    def may_work_beside(self, other: "BusyWorker") -> bool:
        """Returns whether the two workers share no device."""
        return not set(self.group.device_indices) & set(other.group.device_indices)


async def measure_interference(
    groups: RoleGroups, samples: Sequence[Sample], sampling: SamplingParams, recipe: Recipe, *, budget_s: float
) -> tuple[Interference, ...]:
    """Measures the slowdown of each role by each other role that can work concurrently on the cluster's devices.

    samples: samples of a step. If a role has many instances, all of them work, and each accounts for its share.
    """
    workers = list(_make_workers(groups, samples, sampling, recipe))
    one_of_each_role = {worker.role: worker for worker in reversed(workers)}.values()
    pairs = [
        (worker, beside)
        for worker in one_of_each_role
        for role in dict.fromkeys(other.role for other in workers)
        if "rollout" in (worker.role, role)
        and (beside := [other for other in workers if other.role == role and other.may_work_beside(worker)])
    ]
    found = []
    for worker, beside in pairs:
        ratio = await slowdown(worker.call, [other.call for other in beside], budget_s=budget_s / len(pairs))
        each = 1 + max(0.0, ratio - 1) / len(beside)
        found.append(Interference(role=worker.role, beside=beside[0].role, slowdown=each))
    return tuple(found)


async def slowdown(call: Call, others: Sequence[Call], *, budget_s: float) -> float:
    """Returns the relative time of a call while the other calls repeat. Alternates with the call alone."""
    for each in (call, *others):
        await each()  # the first call is slower
    alone: list[float] = []
    beside: list[float] = []
    start_s = time.perf_counter()
    while len(beside) < ROUNDS or time.perf_counter() - start_s < budget_s / 2:
        alone.append(await time_call(call))
        async with _over_and_over(others):
            beside.append(await time_call(call))
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
    await asyncio.sleep(0)  # let the loops start
    try:
        yield
    finally:
        is_over = True
        await asyncio.gather(*loops)


def _make_workers(
    groups: RoleGroups, samples: Sequence[Sample], sampling: SamplingParams, recipe: Recipe
) -> Iterator[BusyWorker]:
    share = math.ceil(len(samples) / len(groups.rollout))
    for place, engine in enumerate(groups.rollout):
        mine = samples[place * share : (place + 1) * share] or samples[:share]
        yield BusyWorker(role="rollout", group=engine, call=_make_generation(engine, mine, sampling))
    if groups.reference:
        reference = groups.reference[0]
        yield BusyWorker(role="reference", group=reference, call=lambda: reference.logprobs(samples))
    if groups.critic:
        yield BusyWorker(role="critic", group=groups.critic, call=train_call(groups.critic, samples, recipe))
    yield BusyWorker(role="actor", group=groups.actor, call=train_call(groups.actor, samples, recipe))


def _make_generation(engine: RolloutGroup, samples: Sequence[Sample], sampling: SamplingParams) -> Call:
    """Returns a call that serves an engine's share of a step, with the sampling of the step."""
    query_ids = find_queries(samples)
    requests = [
        Request(
            uid=sample.prompt.uid,
            owner=sample.key,
            prompt_ids=sample.prompt.token_ids.tolist(),
            params=sampling.model_copy(update={"max_new_tokens": len(query_ids)}) if query_ids else sampling,
            query_ids=tuple(query_ids),
        )
        for sample in samples
    ]
    return lambda: serve_all(engine, requests)
