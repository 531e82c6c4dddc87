"""What a rollout engine costs: calls of one instance, as the runtime makes them, and a model fitted to their times."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interlace.core.profile import RolloutCosts
from interlace.core.types import Prompt, Request, Response, SamplingParams
from interlace.models.size import model_size
from interlace.recipes.config import Recipe
from interlace.recipes.profile_fit import fit, medians
from interlace.runtime.group import WorkerGroup

FEW, MANY = 2, 24
"""Decode steps of a short and of a long call: what comes once a call and what comes each step are told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A serve call: so many sequences, each with a prompt of so many tokens, decode so many steps."""

    batch: int
    prompt_tokens: int
    steps: int


class Requests:
    """New requests without end, each with a name of its own and a prompt of given length.

    Their prompts are cut from one another's tokens at random: an engine that knows a prompt would not compute it again.
    """

    def __init__(self, prompts: Sequence[Prompt], temperature: float) -> None:
        self._tokens = np.concatenate([prompt.token_ids for prompt in prompts])
        self._random = np.random.default_rng(0)
        self._temperature = temperature
        self._number = 0

    def draw(self, cell: Cell) -> list[Request]:
        """The requests of a cell. They end nowhere but at its number of steps."""
        params = SamplingParams(max_new_tokens=cell.steps, temperature=self._temperature)
        return [self._one(cell.prompt_tokens, params) for _ in range(cell.batch)]

    def _one(self, length: int, params: SamplingParams) -> Request:
        self._number += 1
        ids = self._random.choice(self._tokens, length).tolist()
        return Request(uid=f"profile/{self._number}", sample_index=0, prompt_ids=ids, params=params)


async def serve_all(engine: WorkerGroup[Any], requests: Sequence[Request]) -> list[Response]:
    """Serves requests to their ends, as the runtime does: call after call, each until a sequence finishes."""
    done: list[Response] = []
    async with engine.hold("profile"):
        progress = await engine.serve(tuple(requests), ())
        while True:
            done.extend(progress.responses)
            if not progress.num_running + progress.num_waiting:
                return done
            progress = await engine.serve((), ())


async def measure_rollout(
    engine: WorkerGroup[Any], actor: WorkerGroup[Any], recipe: Recipe, prompts: Sequence[Prompt], *, budget_s: float
) -> RolloutCosts:
    """Costs of one instance. budget_s: seconds for decoding; weights and switches are few calls more."""
    requests = Requests(prompts, recipe.sampling.temperature)
    cells = grid(recipe, prompts)

    def call(cell: Cell) -> Callable[[], Awaitable[object]]:
        return lambda: serve_all(engine, requests.draw(cell))

    seconds = await medians([call(cell) for cell in cells], rounds=5, budget_s=budget_s)
    costs = fit_rollout(cells, seconds, kv_tokens=recipe.rollout.max_tokens, max_running=recipe.rollout.max_running)
    return costs.model_copy(update={**await _state(engine, recipe), "update_s": await _update_s(engine, actor)})


def grid(recipe: Recipe, prompts: Sequence[Prompt]) -> list[Cell]:
    """Batches up to what runs at once, contexts up to what the recipe's samples reach, few steps and many."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    reach = longest + recipe.sampling.max_new_tokens
    steps = max(FEW + 1, min(MANY, recipe.sampling.max_new_tokens))
    short, long = max(1, min(longest, reach - steps)), max(1, reach - steps)
    largest = max(1, min(recipe.rollout.max_running, recipe.rollout.max_tokens // (long + steps)))
    batches = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    return [
        Cell(batch=batch, prompt_tokens=length, steps=count)
        for batch in batches
        for length in dict.fromkeys((short, long))
        for count in (FEW, steps)
    ]


def fit_rollout(cells: Sequence[Cell], seconds: Sequence[float], *, kv_tokens: int, max_running: int) -> RolloutCosts:
    """The costs that explain the calls' times best.

    A call of b sequences with prompts of p tokens and n steps takes `call_s + b sequence_s + b p prefill_token_s +
    n step_s(b) + context_token_s (sum over steps of cached tokens)`.
    """
    batches = sorted({cell.batch for cell in cells})

    def row(cell: Cell) -> list[float]:
        read = cell.batch * (cell.steps * cell.prompt_tokens + cell.steps * (cell.steps + 1) / 2)
        steps = [float(cell.steps) if cell.batch == batch else 0.0 for batch in batches]
        return [1.0, cell.batch, cell.batch * cell.prompt_tokens, read, *steps]

    call_s, sequence_s, prefill_token_s, context_token_s, *steps = fit([row(cell) for cell in cells], seconds)
    # A larger batch is not faster: where it seems to be, that is noise.
    floor, rising = 1e-9, []
    for batch, step_s in zip(batches, steps, strict=True):
        floor = max(floor, float(step_s))
        rising.append((batch, floor))
    return RolloutCosts(
        steps=tuple(rising),
        context_token_s=float(context_token_s),
        call_s=float(call_s),
        sequence_s=float(sequence_s),
        prefill_token_s=float(prefill_token_s),
        kv_tokens=kv_tokens,
        max_running=max_running,
    )


async def _state(engine: WorkerGroup[Any], recipe: Recipe) -> dict[str, float]:
    """Memory, and what it takes to leave the device and come back."""
    async with engine.hold("profile"):
        num_bytes = engine.loaded_bytes()
        offload_s, onload_s = await medians([engine.unload, engine.load], rounds=3, budget_s=5.0)
    cache = min(num_bytes, recipe.rollout.max_tokens * model_size(recipe.model).kv_bytes_per_token)
    return {
        "state_bytes": num_bytes - cache,
        "device_bytes": cache,
        "onload_s": onload_s,
        "offload_s": offload_s,
    }


async def _update_s(engine: WorkerGroup[Any], actor: WorkerGroup[Any]) -> float:
    bundle = await actor.export_weights(0, copy=True)
    [update_s] = await medians([lambda: engine.update_weights(bundle, "keep")], rounds=5, budget_s=5.0)
    return update_s
