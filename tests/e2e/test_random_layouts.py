"""Random combinations of recipes, layouts, weight transports and schedules run if the checks accept them."""

import math
import random
from pathlib import Path

import pytest

from interlace.algorithms import algorithm_names
from interlace.core.errors import UserError
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import preset_names
from tests.support.training import metrics, run_recipe

COMMON = (
    "steps=2", "prompts_per_step=4", "logging.loggers=[]", "cluster.hang_after_s=90", "cluster.devices=cpu:2",
)  # fmt: skip
TEXT = (
    "samples_per_prompt=2", "warmup.steps=4", "warmup.until=null", "warmup.batch_size=8",
    "task.reasoning_gym.train_size=48", "task.reasoning_gym.heldout_size=4", "sampling.max_new_tokens=24",
    "reward.correct=3", "reward.incorrect=2",
)  # fmt: skip
ROBOT = ("episode.env.settings.horizon=20", "task.starts.train_size=48", "task.starts.heldout_size=2")
RECIPES = {
    "quickstart": TEXT,
    "calculator": TEXT,
    "second_guess": TEXT,
    "longtail": (*TEXT, "samples_per_prompt=4"),
    "robot-cartpole": ROBOT,
    "robot-pendulum": ROBOT,
}
CHOICES = {
    "minibatches": ("1", "2", "3"),
    "epochs": ("2",),
    "samples_per_prompt": ("1", "3"),
    "eval_every": ("1",),
    "checkpoint_every": ("1",),
    "tokens_per_microbatch": ("64", "200", "2000"),
    "actor.ranks": ("2",),
    "actor.tensor_parallel": ("2",),
    "actor.context_parallel": ("2",),
    "actor.replicate": ("2",),
    "actor.reshard": ("false",),
    "actor.gradient_checkpointing": ("true",),
    "actor.lora": ("{rank: 4}",),
    "critic.ranks": ("2",),
    "rollout.tensor_parallel_size": ("2",),
    "rollout.weights": ("int8",),
    "rollout.kv": ("pages",),
    "rollout.compile_decoder": ("false",),
    "rollout.max_running": ("1", "3"),
    "rollout.draft_tokens": ("0",),
    "schedule.placement.rollout.devices_per_instance": ("2",),
    "schedule.placement.rollout.devices": ("0", "1", "all"),
    "schedule.placement.actor.devices": ("1", "all"),
    "weights.transport": ("shared_memory", "gloo", "folder", "object_store"),
    "weights.codec": ("cast", "int8", "delta"),
    "weights.adapter": ("alone",),
    "weights.full_every": ("1", "2"),
    "model.dtype": ("bfloat16",),
    "reward.workers": ("0", "1", "2"),
    "episode.workers": ("1", "2"),
    "replay": ("{updates: 1, capacity: 64}", "{updates: 0, capacity: 16}"),
    "algorithm.off_policy.correction": ("mask", "truncate"),
    "algorithm.kl_coefficient": ("0.05",),
    "algorithm.advantage_of": ("turn",),
    "schedule.max_staleness": ("0", "0.5", "2"),
    "schedule.sync_every": ("2",),
    "schedule.granularity.actor": ("sample", "group", "step"),
    "schedule.batching": ("arrival",),
    "schedule.on_straggler": ("drop", "requeue"),
    "schedule.publish": ("background",),
    "schedule.on_update": ("drain", "keep", "recompute", "abort_resume"),
    "schedule.weight_update": ("rolling",),
    "schedule.kv_on_switch": ("offload", "recompute"),
    "schedule.tail": ("{kind: oversample, prompts: 1.5}", "{kind: tail_batching}", "{kind: migrate}"),
    "schedule.switch": ("when_ready",),
    "schedule.lend_until": ("0.3",),
    "schedule.concurrency": ("2", "adaptive"),
    "schedule.rollout_budget": ("8",),
    "cluster.threads_per_worker": ("1",),
    "cluster.devices": ("cpu:1", "cpu:3", "cpu:4"),
}
SHARE = 0.1
"""Of the settings above that a run changes."""
RUNS = {"local": 12, "ray": 5}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the warmed-up models, each made once."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("block", range(8))
def test_what_a_check_accepts_runs(tmp_path: Path, cache: Path, block: int) -> None:
    _runs(random.Random(block), tmp_path, cache, "local")


@pytest.mark.ray
@pytest.mark.parametrize("block", range(4))
def test_what_a_check_accepts_runs_on_ray(tmp_path: Path, cache: Path, block: int) -> None:
    _runs(random.Random(1000 + block), tmp_path, cache, "ray")


def _runs(rng: random.Random, root: Path, cache: Path, backend: str) -> None:
    """Runs what a check accepts. A refusal after it is a fault like any other: the check should have known."""
    for number in range(RUNS[backend]):
        recipe, overrides = _possible(rng, root, cache, backend)
        try:
            run_recipe(recipe, root, f"{number}", overrides)
        except Exception as error:
            raise AssertionError(f"{recipe} {' '.join(overrides)}") from error
        rows = metrics(root, f"{number}")
        assert [row["step"] for row in rows] == [1, 2], (recipe, overrides)
        assert all(math.isfinite(value) for row in rows for value in row.values()), (recipe, overrides)


def _possible(rng: random.Random, root: Path, cache: Path, backend: str) -> tuple[str, list[str]]:
    """A recipe and settings that the check accepts; what it refuses is drawn again."""
    while True:
        recipe = rng.choice(list(RECIPES))
        overrides = [*COMMON, *RECIPES[recipe], f"cluster.backend={backend}", f"model.cache_dir={cache}"]
        overrides += [f"weights.folder={root / 'weights'}"]
        if rng.random() < 0.6:
            overrides.append(f"schedule={rng.choice(preset_names())}")
        if rng.random() < 0.4:
            overrides.append(f"algorithm={rng.choice(algorithm_names())}")
        overrides += [f"{name}={rng.choice(values)}" for name, values in CHOICES.items() if rng.random() < SHARE]
        try:
            check_recipe(load_recipe(recipe, overrides))
        except UserError:
            continue
        return recipe, overrides
