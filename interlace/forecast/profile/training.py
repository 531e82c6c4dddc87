"""Measures training and inference on samples of the recipe, and the slowdown of overlapping work."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import numpy as np

from interlace.core.state_parts import OPTIMIZER
from interlace.core.types import FloatArray, Request, Sample, SamplingParams
from interlace.flows.run import RoleGroups
from interlace.forecast.profile.fit import Call, fit, medians, time_call
from interlace.forecast.profile.rollout import find_queries, serve_all
from interlace.forecast.profile.types import CONTROLLER, InferenceCosts, Interference, TrainCosts
from interlace.rollouts.role_groups import ActorGroup, RolloutGroup, TrainedGroup
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.runtime.group import TypedGroup
from interlace.stages.map import Compute, G

Trained = TypeVar("Trained", bound=TrainedGroup)
SHARES = (0.25, 0.5, 1.0)
"""Shares of a minibatch that are timed; they separate the cost of a call from the cost of a token."""
MIN_TOKENS, MOST_COPIES = 256, 8
"""Tokens of the largest timed call at least, and copies of its samples at most. Noise hides the cost of a few dozen
tokens, which the fit then sets to 0."""


def trainable(samples: Sequence[Sample], recipe: Recipe) -> list[Sample]:
    """Returns samples with all columns that the recipe's loss reads, filled with numbers of typical size."""
    random, num_top = np.random.default_rng(0), algorithm_of(recipe).needs.teacher_top
    top_2K = np.stack([np.arange(num_top), np.full(num_top, -math.log(num_top + 1))]).astype(np.float32)

    def fill_columns(sample: Sample) -> Sample:
        noise = random.normal(size=sample.num_tokens).astype(np.float32)
        return replace(
            sample,
            advantages=noise,
            returns=noise,
            values=np.zeros_like(noise),
            ref_logprobs=sample.logprobs,
            process_rewards=np.zeros_like(noise),
            teacher_top=np.tile(top_2K, (sample.num_tokens, 1, 1)) if num_top else None,
        )

    return [fill_columns(sample) for sample in samples]


async def measure_inference(
    group: G, operation: Compute[G, FloatArray], samples: Sequence[Sample], *, budget_s: float
) -> InferenceCosts:
    """Measures an operation of a group that is not trained. samples: samples of a step."""
    call_s, token_s = await _by_tokens(group, operation, samples, budget_s)
    onload_s, offload_s = await _measure_switch(group)
    return InferenceCosts(
        state_bytes=group.state.count_loaded_bytes(),
        onload_s=onload_s,
        offload_s=offload_s,
        call_s=call_s,
        token_s=token_s,
    )


async def measure_training(
    group: Trained,
    operation: Compute[Trained, FloatArray],
    samples: Sequence[Sample],
    recipe: Recipe,
    *,
    budget_s: float,
) -> TrainCosts:
    """Measures training and one inference operation. samples: samples of a step; one minibatch is trained on."""
    ready = trainable(samples, recipe)
    minibatch = ready[: max(1, len(ready) // recipe.minibatches)]
    inference_call_s, inference_token_s = await _by_tokens(group, operation, ready, budget_s / 4)
    calls = [_train(group, part) for part in _make_parts(minibatch)]
    times = await medians(calls, rounds=7, budget_s=budget_s / 2)
    optimizer_s = await _optimizer_s(group, minibatch)
    rows = [[1.0, _num_tokens(part)] for part in _make_parts(minibatch)]
    call_s, token_s = fit(rows, [max(1e-9, seconds - optimizer_s) for seconds in times])
    onload_s, offload_s = await _measure_switch(group)
    await group.step_metrics()
    return TrainCosts(
        state_bytes=group.state.count_loaded_bytes(),
        moment_bytes=group.state.part_bytes.get(OPTIMIZER, 0),
        onload_s=onload_s,
        offload_s=offload_s,
        call_s=float(call_s),
        token_s=float(token_s),
        # A profile has one call overhead for both: the difference of inference is added to its cost per token.
        inference_token_s=max(0.0, inference_token_s + (inference_call_s - float(call_s)) / _num_tokens(ready)),
        optimizer_s=optimizer_s,
    )


async def measure_export(group: ActorGroup) -> float:
    """Measures the seconds that an actor needs to export all its weights."""
    [export_s] = await medians([lambda: group.export_weights(0, copy=True)], rounds=5, budget_s=5.0)
    return export_s


def _train_calls(group: TrainedGroup, samples: Sequence[Sample], recipe: Recipe) -> "Calls":
    """Returns calls that train one minibatch as a step of the recipe does, and a part of it."""
    ready = trainable(samples, recipe)
    return Calls.of(ready[: max(1, len(ready) // recipe.minibatches)], lambda part: _train(group, part))


def _train(group: TrainedGroup, samples: Sequence[Sample]) -> Call:
    async def train() -> None:
        async with group.hold("profile"):
            await group.accumulate(samples)
            await group.optimizer_step()

    return train


async def _optimizer_s(group: TrainedGroup, minibatch: Sequence[Sample]) -> float:
    """Measures the optimizer step alone, with an existing gradient."""
    one = minibatch[:1]
    async with group.hold("profile"):
        calls: list[Call] = [lambda: group.accumulate(one), group.optimizer_step]
        _, seconds = await medians(calls, rounds=7, budget_s=5.0)
    return seconds


async def _by_tokens(
    group: G, operation: Compute[G, FloatArray], samples: Sequence[Sample], budget_s: float
) -> tuple[float, float]:
    """Returns (seconds per call, seconds per token) of an operation on samples."""
    parts = _make_parts(samples)

    def call(part: Sequence[Sample]) -> Call:
        return lambda: group.call(operation, part)

    async with group.hold("profile"):
        times = await medians([call(part) for part in parts], rounds=5, budget_s=budget_s)
    call_s, token_s = fit([[1.0, _num_tokens(part)] for part in parts], times)
    return float(call_s), float(token_s)


async def _measure_switch(group: TypedGroup) -> tuple[float, float]:
    async with group.hold("profile"):
        offload_s, onload_s = await medians([group.state.unload, group.state.load], rounds=3, budget_s=5.0)
    return onload_s, offload_s


def _make_parts(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Returns the first samples in several numbers. Few and short samples are repeated up to MIN_TOKENS in total."""
    repeated = [*samples] * min(MOST_COPIES, -(-MIN_TOKENS // max(1, _num_tokens(samples))))
    sizes = dict.fromkeys(max(1, round(share * len(repeated))) for share in SHARES)
    return [repeated[:size] for size in sizes]


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.num_total_tokens for sample in samples)


ROUNDS = 5
FEW = 8
"""Divisor of the samples in the smaller of two calls, whose constant part is a larger share of their time."""
BURST_S = 1e-4
"""Seconds for which the controller runs Python before it waits for an event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """Calls that a worker repeats, with different numbers of tokens."""

    calls: Sequence[Call]
    tokens: Sequence[int] = ()
    """Tokens of each call. If empty, the calls have no constant part that is measured apart."""

    @classmethod
    def of(cls, samples: Sequence[Sample], make_call: Callable[[Sequence[Sample]], Call]) -> "Calls":
        """Makes a call on all samples, and one on a part of them unless there are too few."""
        parts = [samples, samples[: len(samples) // FEW]] if len(samples) >= FEW else [samples]
        return cls(calls=[make_call(part) for part in parts], tokens=[_num_tokens(part) for part in parts])

    async def measure_shares(self) -> list[float]:
        """Measures the share of the constant part in the time of each call; 0 for a single call."""
        if len(self.tokens) < 2:
            return [0.0] * len(self.calls)
        times = await medians(self.calls, rounds=ROUNDS, budget_s=5.0)
        call_s, _ = fit([[1.0, tokens] for tokens in self.tokens], times)
        return [min(1.0, float(call_s) / seconds) for seconds in times]


@dataclass(frozen=True, kw_only=True, slots=True)
class BusyWorker:
    """An instance and the calls that it repeats."""

    role: str
    group: TypedGroup
    calls: Calls

    def may_work_beside(self, other: "BusyWorker") -> bool:
        """Returns whether the two workers share no device."""
        return not set(self.group.device_indices) & set(other.group.device_indices)


async def measure_interference(
    groups: RoleGroups, samples: Sequence[Sample], sampling: SamplingParams, recipe: Recipe, *, budget_s: float
) -> tuple[Interference, ...]:
    """Measures the slowdown of each role by each other role that can work concurrently on the cluster's devices, and by
    the controller.

    samples: samples of a step. If a role has many instances, all of them work, and each accounts for its share.
    """
    workers = list(_make_workers(groups, samples, sampling, recipe))
    one_of_each_role = {worker.role: worker for worker in reversed(workers)}.values()
    pairs: list[tuple[BusyWorker, list[BusyWorker]]] = [(worker, []) for worker in one_of_each_role]
    pairs += [
        (worker, beside)
        for worker in one_of_each_role
        for role in dict.fromkeys(other.role for other in workers)
        if "rollout" in (worker.role, role)
        and (beside := [other for other in workers if other.role == role and other.may_work_beside(worker)])
    ]
    shares = {worker.role: await worker.calls.measure_shares() for worker in one_of_each_role}
    return tuple([await _measure_pair(*pair, shares, budget_s=budget_s / len(pairs)) for pair in pairs])


async def _measure_pair(
    worker: BusyWorker, beside: Sequence[BusyWorker], shares: Mapping[str, Sequence[float]], *, budget_s: float
) -> Interference:
    """Measures the slowdown of a worker by each of the others; if there are none, by the controller.

    shares: role -> share of the constant part in the time of each of its calls.
    """
    role = beside[0].role if beside else CONTROLLER
    trained = worker if len(shares[worker.role]) > 1 or not beside else beside[0]
    excess: list[float] = []
    for place in range(len(shares[trained.role])):
        call = worker.calls.calls[place if trained is worker else 0]
        others = [other.calls.calls[place if trained is other else 0] for other in beside] or [_run_controller]
        ratio = await slowdown(call, others, budget_s=budget_s / len(shares[trained.role]))
        excess.append(max(0.0, ratio - 1) / len(others))
    return split_slowdown(worker.role, role, shares[trained.role], [1 + each for each in excess])


def split_slowdown(role: str, beside: str, shares: Sequence[float], slowdowns: Sequence[float]) -> Interference:
    """Splits the slowdowns of two calls into a slowdown of the constant part and one of the rest.

    shares: share of the constant part in the time of each call. The slowdown of a single call is not split.
    """
    if len(slowdowns) == 1:
        return Interference(role=role, beside=beside, slowdown=slowdowns[0])
    of_call, of_rest = fit([[share, 1 - share] for share in shares], slowdowns)
    return Interference(
        role=role, beside=beside, slowdown=max(1.0, float(of_rest)), call_slowdown=max(1.0, float(of_call))
    )


async def _run_controller() -> None:
    """Runs Python on the controller's thread, as the controller does between two events."""
    until_s = time.perf_counter() + BURST_S
    while time.perf_counter() < until_s:
        pass
    await asyncio.sleep(0)


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
        yield BusyWorker(role="rollout", group=engine, calls=Calls(calls=[_make_generation(engine, mine, sampling)]))
    if groups.reference:
        reference = groups.reference[0]
        calls = Calls.of(samples, lambda part: lambda: reference.logprobs(part))
        yield BusyWorker(role="reference", group=reference, calls=calls)
    if groups.critic:
        yield BusyWorker(role="critic", group=groups.critic, calls=_train_calls(groups.critic, samples, recipe))
    yield BusyWorker(role="actor", group=groups.actor, calls=_train_calls(groups.actor, samples, recipe))


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
