"""The costs of a rollout engine are fitted from the times of its calls."""

import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.forecast.profile.rollout import Cell, Measured, Requests, fit_rollout, grid
from interlace.forecast.profile.types import RolloutCosts
from interlace.run.recipe.load import load_recipe


def prompts(longest: int = 8) -> list[Prompt]:
    return [Prompt(uid="p", token_ids=np.arange(longest, dtype=np.int32), text="", answer="")]


def samples(*lengths: int) -> list[Sample]:
    return [
        Sample(key=SampleKey(0, place), prompt=prompts()[0], segments=(Segment(token_ids=np.zeros(length, np.int32)),))
        for place, length in enumerate(lengths)
    ]


def calls_of(cell: Cell) -> int:
    """One returns when a sequence ends."""
    return len(set(cell.steps))


def measured(seconds: Sequence[float]) -> list[Measured]:
    """The cells below."""
    return [
        Measured(cell=cell, num_calls=calls_of(cell), seconds=taken) for cell, taken in zip(CELLS, seconds, strict=True)
    ]


def seconds_of(cell: Cell, costs: RolloutCosts) -> float:
    """As the simulator reckons: one step after the other."""
    seconds = calls_of(cell) * costs.call_s + costs.intake_s
    seconds += cell.batch * costs.sequence_s + cell.num_prompts * cell.prompt_tokens * costs.prefill_token_s
    for step in range(1, max(cell.steps) + 1):
        running = sum(steps >= step for steps in cell.steps)
        seconds += costs.step_s(running) + running * (cell.prompt_tokens + step) * costs.context_token_s
    return seconds


COSTS = RolloutCosts(
    steps=((1, 1e-3), (4, 1.1e-3), (16, 2e-3), (64, 6e-3)),
    context_token_s=1e-7,
    call_s=5e-4,
    intake_s=2e-3,
    sequence_s=1e-4,
    prefill_token_s=2e-5,
    kv_tokens=8192,
)
CELLS = [
    *(Cell.even(batch, length, steps) for batch, length, steps in product((1, 4, 16, 64), (8, 64), (2, 24))),
    *(Cell(prompt_tokens=8, steps=tuple(range(1, batch + 1)), per_prompt=4) for batch in (4, 16, 64)),
]


def test_the_costs_behind_the_times_are_found() -> None:
    found = fit_rollout(measured([seconds_of(cell, COSTS) for cell in CELLS]), kv_tokens=8192, max_running=64)
    assert found.steps == tuple((batch, pytest.approx(seconds, rel=1e-6)) for batch, seconds in COSTS.steps)
    for name in ("context_token_s", "call_s", "intake_s", "sequence_s", "prefill_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=1e-4), name


def test_noise_leaves_every_call_explained_and_no_larger_batch_faster() -> None:
    draw = random.Random(0)
    times = [seconds_of(cell, COSTS) * draw.uniform(0.9, 1.1) for cell in CELLS]
    found = fit_rollout(measured(times), kv_tokens=8192, max_running=64)
    for cell in CELLS:
        assert seconds_of(cell, found) == pytest.approx(seconds_of(cell, COSTS), rel=0.15)
    seconds = [each for _, each in found.steps]
    assert seconds == sorted(seconds)


def test_the_grid_reaches_what_the_recipe_reaches_and_no_further() -> None:
    recipe = load_recipe("quickstart", [])
    cells = grid(recipe, samples(3, 9, 20), kv_tokens=8192)
    assert {cell.batch for cell in cells} >= {1, 2, 4, 8, 16, 32, 64, 128}
    assert max(cell.prompt_tokens + max(cell.steps) for cell in cells) == 8 + recipe.sampling.max_new_tokens
    small = load_recipe("quickstart", ["rollout.max_running=100"])
    cells = grid(small, samples(3), kv_tokens=400)
    assert max(cell.batch * (cell.prompt_tokens + max(cell.steps)) for cell in cells) <= 400


def test_some_cells_end_as_the_policys_responses_do() -> None:
    cells = grid(load_recipe("quickstart", []), samples(*range(1, 33)), kv_tokens=8192)
    assert any(calls_of(cell) == 32 for cell in cells)


@pytest.mark.parametrize("new_tokens", [1, 2, 3])
def test_short_responses_still_make_a_grid(new_tokens: int) -> None:
    recipe = load_recipe("quickstart", [f"sampling.max_new_tokens={new_tokens}"])
    cells = grid(recipe, samples(new_tokens), kv_tokens=8192)
    assert min(cell.prompt_tokens for cell in cells) >= 1 and min(min(cell.steps) for cell in cells) >= 1


def test_no_two_requests_are_the_same() -> None:
    requests = Requests(prompts(64), temperature=1.0)
    cell = Cell.even(32, 16, 4)
    drawn = [*requests.draw(cell), *requests.draw(cell)]
    assert len({request.id for request in drawn}) == 64
    assert len({tuple(request.prompt_ids) for request in drawn}) == 64
    assert {request.params.max_new_tokens for request in drawn} == {4}


def test_requests_share_prompts_as_the_samples_of_a_group_do() -> None:
    drawn = Requests(prompts(64), temperature=1.0).draw(Cell(prompt_tokens=16, steps=(3, 4, 5, 6), per_prompt=2))
    assert drawn[0].uid == drawn[1].uid != drawn[2].uid == drawn[3].uid
    assert drawn[0].prompt_ids == drawn[1].prompt_ids != drawn[2].prompt_ids
    assert [request.owner.index for request in drawn] == [0, 1, 0, 1]
    assert [request.params.max_new_tokens for request in drawn] == [3, 4, 5, 6]
