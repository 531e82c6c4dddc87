"""Every shipped recipe trains a step at toy size, is profiled and simulated. The recipes of SmolLM2 pass the check at
its published sizes.
"""

import importlib.util
from pathlib import Path

import pytest
from transformers import LlamaConfig

from interlace.forecast.profile.profile import profile_recipe
from interlace.forecast.simulate import Simulation, simulate
from interlace.models.tiny import build_tiny
from interlace.observe.progress import QuietProgress
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.config import algorithm_of, is_offline
from interlace.run.recipe.load import load_recipe, recipe_names
from tests.support.training import run_recipe

SMALLER = ("steps=1", "prompts_per_step=2", "minibatches=1", "evaluation.num_prompts=2", "eval_every=0")
ON_TINY = ("model=tiny:micro",)
CHANGES = {
    "distill": ("reference.model=tiny:micro",),
    "one-gpu": ("model=tiny:micro-chat", "sampling.max_new_tokens=32", "rollout.max_tokens=8192"),
    "smollm2": ON_TINY,
    "smollm2-lora": ON_TINY,
    "smollm2-distill": (*ON_TINY, "reference.model=tiny:micro"),
    "robot-world-model": ("prompts_per_step=4",),
    "robot-world-model-pixels": ("prompts_per_step=4", "world_model.fit_steps=5"),
}
"""Changes of single recipes: models that are not downloaded are replaced."""
SIZES = {"student": (576, 1536, 30, 9, 3), "teacher": (960, 2560, 32, 15, 5)}
"""SmolLM2-135M and 360M: hidden size, MLP, layers, heads and key-value heads."""
PACKAGES = {
    **{"maniskill": "mani_skill", "libero": "libero", "robot-mjx": "mujoco.mjx"},
    **{"react": "langgraph", "program": "openai", "clone": "metaworld"},
}


def list_profiled() -> list[str]:
    """Returns the recipes that sample and train on samples; see refuse_unprofiled."""
    recipes = {name: load_recipe(name) for name in recipe_names()}
    return [name for name, each in recipes.items() if not (is_offline(each) or algorithm_of(each).needs.transitions)]


def list_changes(name: str, folder: Path) -> list[str]:
    """Returns the settings of a recipe at toy size. Skips the test if a package of the recipe is missing."""
    package = PACKAGES.get(name, "metaworld" if name.startswith(("robot", "metaworld")) else None)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    recipe = load_recipe(name)
    changes = [*SMALLER, *CHANGES.get(name, ()), f"model.cache_dir={folder}"]
    if recipe.warmup is not None:
        changes += ["warmup.steps=2", "warmup.until=null", "warmup.batch_size=4"]
        changes += ["warmup.experts.episodes=1"] if recipe.warmup.experts else []
    if recipe.replay is not None and recipe.replay.experts is not None:
        changes += ["replay.experts.episodes=1", "replay.updates=2"]
    if recipe.algorithm.name == "sac":
        changes += ["algorithm.start_turns=4", "algorithm.turns_per_update=4"]
    return changes


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_trains_a_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = run_recipe(name, tmp_path, "one", list_changes(name, tmp_path))
    assert report.done_steps == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", list_profiled())
def test_a_shipped_recipe_is_profiled_and_simulated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(name, [*list_changes(name, tmp_path), "cluster.devices=cpu:2"])
    check_recipe(recipe)
    profile = profile_recipe(recipe, QuietProgress(), budget_s=1.0)
    found = simulate(recipe, Simulation(profile=profile, num_devices=2))
    assert found.run.values("timing_s/step")[0] > 0


@pytest.mark.parametrize(
    ("name", "share"),
    [("smollm2", None), ("smollm2-lora", 0.04), ("smollm2-distill", None)],
)
def test_a_recipe_of_smollm2_passes_the_check_at_published_size(name: str, share: float | None, tmp_path: Path) -> None:
    """With the published configurations of student and teacher, and a small tokenizer."""
    for folder, (hidden, inner, layers, heads, kv_heads) in SIZES.items():
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True,
        )  # fmt: skip
        config.architectures = ["LlamaForCausalLM"]
        for part in (config, build_tiny("micro", 0)[1]):
            part.save_pretrained(tmp_path / folder)
    changes = [f"model.path={tmp_path}/student"]
    if name == "smollm2-distill":
        changes.append(f"reference.model={tmp_path}/teacher")
    derived = check_recipe(load_recipe(name, changes))
    assert derived.num_parameters == pytest.approx(134.5e6, rel=0.01)
    assert (derived.num_lora_parameters is None) == (share is None)
    if share is not None:
        assert (derived.num_lora_parameters or 0) < share * derived.num_parameters
