"""Measures calls of one rollout engine instance, as the runtime makes them, and fits a cost model to their times."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from interlace.core.state_parts import KV
from interlace.core.types import NO_GROUP, Prompt, Request, Response, Sample, SampleKey, SamplingParams
from interlace.forecast.profile.fit import Call, batches_to, fit, medians
from interlace.forecast.profile.types import RolloutCosts
from interlace.models.loading import empty_model
from interlace.models.size import model_size
from interlace.rollouts.role_groups import ActorGroup, RolloutGroup
from interlace.run.recipe.config import Recipe
from interlace.weights.ref import WeightRef
from interlace.workers.rollout import MIN_CALL_S

ROUNDS = 5
FEW, MANY = 2, 24
"""Decode steps of a short and of a long call, which separate the cost of a call from the cost of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Requests that are served together: one for each entry of `steps`, with prompts of `prompt_tokens` tokens."""

    prompt_tokens: int
    steps: tuple[int, ...]
    per_prompt: int = 1
    """Requests that share a prompt, which an engine computes once."""

    @classmethod
    def even(cls, batch: int, prompt_tokens: int, steps: int, per_prompt: int = 1) -> "Cell":
        """Makes a cell whose requests all end at the same step, so that one call serves them."""
        return cls(prompt_tokens=prompt_tokens, steps=(steps,) * batch, per_prompt=per_prompt)

    @property
    def batch(self) -> int:
        """Sequences at the start."""
        return len(self.steps)

    @property
    def num_prompts(self) -> int:
        return -(-self.batch // self.per_prompt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measured time of a cell."""

    cell: Cell
    num_calls: int
    """Number of calls of the engine."""
    seconds: float


class Requests:
    """Endless source of new requests, each with a separate name and a prompt of a given length.

    Prompts are drawn at random from the tokens of real prompts, because an engine would not recompute a cached prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], temperature: float, query_ids: Sequence[int] = ()) -> None:
        """query_ids: tokens from which a policy draws an answer at once; see Request."""
        self._tokens = np.concatenate([prompt.token_ids for prompt in prompts])
        self._query_ids = tuple(query_ids)
        self._random = np.random.default_rng(0)
        self._temperature = temperature
        self._num_prompts = 0

    def draw(self, cell: Cell) -> list[Request]:
        """Draws the requests of a cell. They end only after their number of steps."""
        found = []
        params = {
            steps: SamplingParams(max_new_tokens=steps, temperature=self._temperature) for steps in set(cell.steps)
        }
        for place, steps in enumerate(cell.steps):
            if place % cell.per_prompt == 0:
                prompt_ids = self._random.choice(self._tokens, cell.prompt_tokens).tolist()
                self._num_prompts += 1
            uid, index = f"profile/{self._num_prompts}", place % cell.per_prompt
            found.append(
                Request(
                    uid=uid,
                    owner=SampleKey(NO_GROUP, index),
                    prompt_ids=prompt_ids,
                    params=params[steps],
                    query_ids=self._query_ids,
                )
            )
        return found


async def serve_all(engine: RolloutGroup, requests: Sequence[Request]) -> tuple[list[Response], int]:
    """Serves requests to their ends, call after call, as the runtime does. Returns the responses and the number of
    calls.
    """
    done: list[Response] = []
    num_calls = 1
    async with engine.hold("profile"):
        progress = await engine.serve(tuple(requests), ())
        while True:
            done.extend(progress.responses)
            if not progress.num_running + progress.num_waiting:
                return done, num_calls
            num_calls += 1
            progress = await engine.serve((), ())


async def measure_rollout(
    engine: RolloutGroup, actor: ActorGroup, recipe: Recipe, samples: Sequence[Sample], *, budget_s: float
) -> RolloutCosts:
    """Measures the costs of one instance. samples: samples of the policy. budget_s: seconds for decoding; the other
    measurements are a few further calls.
    """
    query_ids, kv_tokens = find_queries(samples), count_kv_tokens(engine, recipe)
    requests = Requests([sample.prompt for sample in samples], recipe.sampling.temperature, query_ids)
    cells = grid(recipe, samples, num_queries=len(query_ids), kv_tokens=kv_tokens)
    num_calls = dict.fromkeys(cells, 0)

    def call(cell: Cell) -> Call:
        drawn = iter([requests.draw(cell) for _ in range(ROUNDS + 1)])  # building requests is no cost of the engine

        async def serve() -> None:
            _, num_calls[cell] = await serve_all(engine, next(drawn))

        return serve

    seconds = await medians([call(cell) for cell in cells], rounds=ROUNDS, budget_s=budget_s)
    measured = [
        Measured(cell=cell, num_calls=num_calls[cell], seconds=taken)
        for cell, taken in zip(cells, seconds, strict=True)
    ]
    costs = fit_rollout(measured, kv_tokens=kv_tokens, max_running=recipe.rollout.max_running)
    state = await _measure_state(engine, recipe, kv_tokens)
    fixed = {} if recipe.rollout.max_tokens == "auto" else {"engine_kv_tokens": recipe.rollout.kv_tokens}
    return costs.model_copy(
        update={**state, **fixed, "min_call_s": MIN_CALL_S, "update_s": await _update_s(engine, actor)}
    )


def count_kv_tokens(engine: RolloutGroup, recipe: Recipe) -> int:
    """Returns the capacity of a device's KV cache in tokens; of max_tokens=auto, the size that the engine chose."""
    token_bytes = model_size(empty_model(recipe.model)).kv_bytes_per_token
    chosen = engine.state.part_bytes.get(KV, 0) // max(1, token_bytes)
    return chosen if chosen and recipe.rollout.max_tokens == "auto" else recipe.rollout.kv_tokens


def find_queries(samples: Sequence[Sample]) -> Sequence[int]:
    """Returns the query tokens from which the policy drew its answers; empty if it answered token by token."""
    found = (segment.query_ids for sample in samples for segment in sample.segments)
    return next((queries.tolist() for queries in found if queries is not None), ())


def grid(recipe: Recipe, samples: Sequence[Sample], *, kv_tokens: int, num_queries: int = 0) -> list[Cell]:
    """Returns cells of batches up to the engine's limit: few and many steps, separate and shared prompts, contexts up
    to the recipe's longest, and responses with the policy's lengths. kv_tokens: capacity of the KV cache. num_queries:
    tokens of every answer, if the policy draws an answer at once.
    """
    prompt = max(len(sample.prompt.token_ids) for sample in samples)
    reach = prompt + recipe.sampling.max_new_tokens
    many = max(FEW + 1, min(MANY, recipe.sampling.max_new_tokens))
    long = max(1, reach - many)
    largest = max(1, min(recipe.rollout.max_running, kv_tokens // (long + many)))
    batches = batches_to(largest)
    share = recipe.samples_per_prompt
    if num_queries:
        return [Cell.even(batch, prompt, num_queries, each) for batch in batches for each in dict.fromkeys((1, share))]
    lengths = [max(1, sample.num_tokens) for sample in samples]
    return [
        cell
        for batch in batches
        for cell in (
            Cell.even(batch, prompt, FEW),
            Cell.even(batch, prompt, FEW, share),
            Cell.even(batch, prompt, many, share),
            Cell.even(batch, long, many),
            Cell(
                prompt_tokens=prompt,
                steps=tuple(np.resize(lengths[:: max(1, len(lengths) // batch)], batch).tolist()),
                per_prompt=share,
            ),
        )
    ]


def fit_rollout(measured: Sequence[Measured], *, kv_tokens: int, max_running: int) -> RolloutCosts:
    """Returns the costs that best explain the times.

    Serving b requests with m prompts of p tokens takes `intake_s + b sequence_s + m p prefill_token_s`, `call_s` for
    each call, and for each decode step `step_s(running) + context_token_s (cached tokens)`.
    """
    batches = sorted({each.cell.batch for each in measured})
    rows = [_make_row(each, batches) for each in measured]
    seconds = [each.seconds for each in measured]
    call_s, intake_s, sequence_s, prefill_token_s, context_token_s, *steps = fit(rows, seconds)
    return RolloutCosts(
        steps=rising(batches, steps),
        context_token_s=float(context_token_s),
        call_s=float(call_s),
        intake_s=float(intake_s),
        sequence_s=float(sequence_s),
        prefill_token_s=float(prefill_token_s),
        kv_tokens=kv_tokens,
        max_running=max_running,
    )


def rising(batches: Sequence[int], steps_s: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Returns (batch, seconds of a decode step), non-decreasing: a larger batch that seems faster is noise."""
    return tuple(zip(batches, accumulate([max(1e-9, float(step_s)) for step_s in steps_s], max), strict=True))


def _make_row(measured: Measured, batches: Sequence[int]) -> list[float]:
    """Returns the coefficients of each cost; a batch between two measured sizes is interpolated linearly."""
    cell = measured.cell
    lengths = np.asarray(cell.steps)
    running = np.asarray([(lengths >= step).sum() for step in range(1, int(lengths.max()) + 1)])
    read = float((running * (cell.prompt_tokens + np.arange(1, len(running) + 1))).sum())
    shares = [np.interp(running, batches, np.eye(len(batches))[place]).sum() for place in range(len(batches))]
    return [measured.num_calls, 1.0, cell.batch, cell.num_prompts * cell.prompt_tokens, read, *shares]


async def _measure_state(engine: RolloutGroup, recipe: Recipe, kv_tokens: int) -> dict[str, float]:
    """Measures the memory of the instance, and the time to move its state off the device and back."""
    async with engine.hold("profile"):
        num_bytes = engine.state.count_loaded_bytes()
        offload_s, onload_s = await medians([engine.state.unload, engine.state.load], rounds=3, budget_s=5.0)
    cache = min(num_bytes, kv_tokens * model_size(empty_model(recipe.model)).kv_bytes_per_token)
    return {
        "state_bytes": num_bytes - cache,
        "device_bytes": cache,
        "onload_s": onload_s,
        "offload_s": offload_s,
    }


async def _update_s(engine: RolloutGroup, actor: ActorGroup) -> float:
    ref = WeightRef(version=0, parts=tuple(await actor.export_weights(0, copy=True)))
    [update_s] = await medians([lambda: engine.update_weights(ref, "keep")], rounds=5, budget_s=5.0)
    return update_s
