"""Real runs with random settings end, have consistent figures, and continue after a stop."""

import math
import random
from pathlib import Path

import pytest

from interlace.algorithms import algorithm_names
from interlace.core.errors import UserError
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.schedule.equivalents import refuse_races
from interlace.schedule.presets import preset_names
from tests.support.ledgers import check_books
from tests.support.training import SMALL, metrics, run

CHOICES = {
    "minibatches": ("2", "3", "4"),
    "prompts_per_step": ("3", "5"),
    "samples_per_prompt": ("1", "2"),
    "eval_every": ("2",),
    "algorithm.drop_zero_variance": ("true", "false"),
    "algorithm.kl_coefficient": ("0.05",),
    "algorithm.off_policy.correction": ("mask",),
    "algorithm.off_policy.proximal": ("recomputed", "interpolated"),
    "actor.lora": ("{rank: 4}",),
    "reward.shaping.length_weight": ("0.5",),
    "reward.shaping.overlong_limit": ("20",),
    "schedule.max_staleness": ("0", "0.5", "1", "3"),
    "schedule.sync_every": ("2",),
    "schedule.granularity.actor": ("sample", "4", "group", "step"),
    "schedule.batching": ("arrival",),
    "schedule.on_straggler": ("drop", "requeue"),
    "schedule.publish": ("background",),
    "schedule.on_update": ("drain", "keep", "recompute", "abort_resume"),
    "schedule.weight_update": ("rolling",),
    "schedule.dispatch": ("least_tokens", "longest_first", "skew_aware"),
    "schedule.tail": ("{kind: oversample, prompts: 1.5}", "{kind: tail_batching}", "{kind: migrate}"),
    "schedule.switch": ("when_ready",),
    "schedule.rollout_budget": ("8",),
    "schedule.concurrency": ("2", "adaptive"),
}
SHARE = 0.2
"""Of the settings above that a run changes."""
STEPS = 3
BASE = tuple(setting for setting in SMALL if not setting.startswith("algorithm."))
"""What is left has to suit every algorithm."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warmed-up model is made once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 16))])
def test_a_run_of_any_settings_ends_with_books_that_add_up(root: Path, block: int) -> None:
    rng = random.Random(block)
    for number in range(12):
        overrides = _possible(rng)
        name = f"{block}-{number}"
        report = run(root, name, overrides, base=BASE)
        rows = metrics(root, name)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), overrides
        assert all(math.isfinite(value) for row in rows for value in row.values()), overrides
        check_books(root / name, report)
        if rng.random() < 0.3:
            run(root, f"{name}-stopped", overrides, base=BASE, stop_after=1)
            run(root, f"{name}-stopped", overrides, base=BASE, resume=True)
            _compare(rows, metrics(root, f"{name}-stopped"), overrides)


def _possible(rng: random.Random) -> list[str]:
    """Overrides under which a run begins; what is refused before is drawn again."""
    while True:
        algorithm, schedule = rng.choice(algorithm_names()), rng.choice(preset_names())
        overrides = [f"steps={STEPS}", f"algorithm={algorithm}", f"schedule={schedule}"]
        overrides += ["reward.correct=3", "reward.incorrect=2"]  # MaxRL takes no negative ones, with penalties neither
        overrides += [f"{name}={rng.choice(values)}" for name, values in CHOICES.items() if rng.random() < SHARE]
        try:
            check_recipe(load_recipe("quickstart", [*BASE, *overrides]))
        except UserError:
            continue
        return overrides


def _compare(whole: list[dict[str, float]], resumed: list[dict[str, float]], overrides: list[str]) -> None:
    """Where nothing is a race, and the stop was at a publication, a run that goes on is the run that never stopped."""
    assert len(resumed) == len(whole), overrides
    schedule = load_recipe("quickstart", [*BASE, *overrides]).schedule.resolved
    try:
        refuse_races(schedule)
    except UserError:
        return
    if schedule.sync_every == 1:
        for before, after in zip(whole, resumed, strict=True):
            assert after == pytest.approx(before, rel=2e-3, abs=1e-5), overrides
