"""Recipes are loaded by name or path; `key=value` changes only the named key."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.data.config import PromptFormat
from interlace.engines.rollout.config import NativeConfig
from interlace.observe.run_folder import RunFolder
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe, override_key, recipe_names

TEXT = """# A recipe
model: tiny:micro
task: number_sorting
reward: {name: reasoning_gym, tag: answer}
algorithm: {name: grpo, clip_high: 0.3}
schedule: {preset: one-step-off, max_staleness: 2}
cluster: {devices: "cpu:2"}
steps: 3
prompts_per_step: 4
samples_per_prompt: 2
optimizer: {lr: 1e-3}
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT)
    return str(file)


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_loads_and_its_resolved_form_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    folder = RunFolder.create(tmp_path, "one")
    folder.write_config(recipe)
    assert load_recipe(str(folder.config)) == recipe


def test_the_quick_start_and_the_small_real_model_are_shipped() -> None:
    assert {"quickstart", "smollm2"} <= set(recipe_names())


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["steps=7"], "steps", 7),
        (["optimizer.lr=2e-5"], "optimizer.lr", 2e-5),
        (["steps=7", "steps=8"], "steps", 8),
        (["sampling.stop=[a, b]"], "sampling.stop", ["a", "b"]),
        (["warmup.steps=5"], "warmup.steps", 5),
        (["logging.loggers=[]"], "logging.loggers", []),
        (["task.format.system=It's 2 = 2"], "task.format.system", "It's 2 = 2"),
        (["optimizer.max_grad_norm=null"], "optimizer.max_grad_norm", None),
        (["model=tiny:mini"], "model.path", "tiny:mini"),
        (["model.seed=4", "model=tiny:mini"], "model.seed", 4),
        (["cluster=local"], "cluster.devices", "cpu:2"),
        (["cluster.hang_after_s=5"], "cluster.devices", "cpu:2"),
        (["task.reasoning_gym.train_size=9"], "task.reasoning_gym.name", "number_sorting"),
        (["reward.tag=3e8f1abc"], "reward.tag", "3e8f1abc"),
        (["task=rows.jsonl"], "task.files.train", "rows.jsonl"),
        (["task=rows.jsonl"], "task.reasoning_gym", None),
        (["reward=exact"], "reward.tag", None),
        (["algorithm.clip_low=0.1"], "algorithm.clip_high", 0.3),
        (["algorithm=grpo"], "algorithm.clip_high", 0.2),
        (["algorithm=grpo", "algorithm.clip_low=0.1"], "algorithm.clip_low", 0.1),
        (["schedule.sync_every=2"], "schedule.max_staleness", 2.0),
        (["schedule.sync_every=2"], "schedule.preset", "one-step-off"),
        (["schedule=one-step-off"], "schedule.max_staleness", 1.0),
        (["schedule=verl-colocated", "schedule.max_staleness=4"], "schedule.max_staleness", 4.0),
        (["schedule.placement.actor=0"], "schedule.placement.actor.devices", "0"),
        (["schedule.placement.actor=0"], "schedule.placement.rollout.devices", "0-50%"),
    ],
)
def test_an_override_changes_what_it_names(path: str, overrides: list[str], key: str, value: object) -> None:
    found: object = load_recipe(path, overrides).model_dump(mode="json")
    for part in key.split("."):
        assert isinstance(found, dict)
        found = found[part]
        if found is None:
            break
    assert found == value


def test_a_preset_of_ones_own_is_a_path(path: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("max_staleness: 5\n")
    schedule = load_recipe(path, [f"schedule={tmp_path / 'own.yaml'}"]).schedule
    assert schedule.model_dump(mode="json")["max_staleness"] == 5.0


def test_sections_of_parts_that_were_not_mentioned_can_be_changed(tmp_path: Path) -> None:
    bare = tmp_path / "bare.yaml"
    bare.write_text(TEXT.replace("schedule:", "# ").replace("algorithm:", "# "))
    recipe = load_recipe(str(bare), ["schedule.max_staleness=1", "algorithm.clip_low=0.1"])
    assert (recipe.schedule.preset, recipe.algorithm.name) == ("verl-colocated", "grpo")


LINES = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=20)
NUMBERS = ("1e4", "0E0", "-1.5e-3", "12", "no")


@settings(max_examples=25)
@given(
    steps=st.integers(1, 10**6),
    lr=st.floats(1e-12, 1.0),
    staleness=st.floats(0, 1e3),
    stop=st.lists(LINES.filter(bool) | st.sampled_from(NUMBERS), max_size=3),
    system=st.none() | LINES,
)
def test_any_recipe_survives_being_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, steps: int, lr: float, staleness: float, stop: list[str], system: object
) -> None:
    recipe = Recipe.parse(
        {
            "model": "tiny:micro",
            "task": {"reasoning_gym": {"name": "x"}, "format": {"system": system}},
            "reward": "exact",
            "steps": steps,
            "prompts_per_step": 1,
            "samples_per_prompt": 1,
            "optimizer": {"lr": lr},
            "sampling": {"stop": stop},
            "schedule": {"max_staleness": staleness},
        }
    )
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), "any")
    folder.write_config(recipe)
    assert load_recipe(str(folder.config)) == recipe


@pytest.mark.parametrize(
    ("override", "sentences"),
    [
        ("steps", ["cannot read the override 'steps'", "key=value"]),
        ("=3", ["cannot read the override '=3'", "key=value"]),
        ("a b=3", ["cannot read the override 'a b=3'"]),
        ("steps=[1", ["'steps=[1' is not YAML", "quotes"]),
        ("steps=" + "[" * 200_000, ["[ is not YAML", "quotes"]),
        ("task.format.template={a} {b}", ["quotes", """'task.format.template="{a} {b}"'"""]),
        ("stepss=3", ["unknown key 'stepss'", "Did you mean 'steps'?"]),
        ("optimizer.lrr=3", ["unknown key 'optimizer.lrr'", "Did you mean 'lr'?"]),
        ("lr=3", ["unknown key 'lr'", "optimizer.lr"]),
        ("actor_rollout_ref.rollout.n=8", ["unknown key 'actor_rollout_ref.rollout.n'", "write samples_per_prompt"]),
        ("data.train_batch_size=8", ["unknown key 'data.train_batch_size'", "write prompts_per_step"]),
        ("keep_checkpoints=best", ["keep_checkpoints = 'best'", "Write best=eval/accuracy_greedy"]),
        ("steps=many", ["steps = 'many'", "a whole number"]),
        ("steps=2.5", ["steps = 2.5", "a whole number"]),
        ("optimizer.lr=fast", ["optimizer.lr = 'fast'", "it must be a number"]),
        ("optimizer=3", ["optimizer = 3", "it has settings, so write optimizer.lr="]),
        ("steps.x=1", ["'steps' is 3, which has no keys"]),
        ("schedule=none.yaml", ["schedule 'none.yaml': there is no such file"]),
    ],
)
def test_a_mistake_in_an_override_is_named(path: str, override: str, sentences: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe(path, [override])
    for sentence in sentences:
        assert sentence in str(raised.value)


def test_sections_that_are_lists_have_keys_too(tmp_path: Path) -> None:
    file = tmp_path / "lists.yaml"
    sources = "[{source: chain_sum, weight: 3}, {source: words.csv, weight: 1}]"
    rewards = "[exact, {name: math_verify, weight: 0.5}]"
    file.write_text(TEXT.replace("number_sorting", sources).replace("{name: reasoning_gym, tag: answer}", rewards))
    changes = ["task.heldout_sets.hard=hard.jsonl", "task={format: {system: Add}}", "reward.timeout_s=3"]
    found = load_recipe(str(file), changes)
    assert [part.weight for part in found.task.mixture] == [3, 1] and set(found.task.heldout_sets) == {"hard"}
    assert found.task.format.system == "Add"
    assert found.reward is not None and (len(found.reward.parts), found.reward.timeout_s) == (2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "contains no settings"),
        ("", "contains no settings"),
        ("steps: [1\n", "is not YAML"),
        ("[" * 200_000, "is not YAML: its brackets or lists are nested too deeply"),
        (TEXT + "steps: 4\n", "key 'steps' is written twice"),
        (TEXT.replace("steps: 3", "step: 3"), "unknown key 'step'. Did you mean 'steps'"),
        (TEXT.replace("steps: 3", ""), "missing key 'steps'"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_recipe(str(file))


def test_an_unknown_recipe_is_met_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"unknown recipe 'quickstrat'\. Did you mean 'quickstart'"):
        load_recipe("quickstrat")
    with pytest.raises(UserError, match=r"recipe 'none\.yaml': there is no such file"):
        load_recipe("none.yaml")


def test_the_key_of_an_override() -> None:
    assert override_key("task.format.template=a=b") == "task.format.template"


def test_sections_that_a_run_of_the_version_before_wrote_are_read(path: str) -> None:
    """Keys that have come since take the values that held when there was none."""
    Path(path).write_text(
        TEXT
        + "rollout: {max_running: 128, max_tokens: 8192, max_batch_tokens: 2048}\n"
        + "actor: {ranks: null, reshard: true, gradient_checkpointing: true, liger: false, lora: null}\n"
        + "critic: {ranks: null, reshard: true, gradient_checkpointing: false, value_clip: 0.4, success_reward: 0.5}\n"
        + "tokens_per_microbatch: 4096\n"
    )
    aggregation = ["algorithm.aggregation=seq_mean_token_mean", "algorithm.skip_minibatch_ratio=2"]
    recipe = load_recipe(path, aggregation)
    assert recipe.rollout == NativeConfig(max_running=128, max_tokens=8192)
    assert recipe.actor.gradient_checkpointing and recipe.critic.value_clip == 0.4
    assert recipe.tokens_per_microbatch == 4096
    assert recipe.algorithm.settings.aggregation == "seq_mean_token_mean"
    assert recipe.algorithm.settings.skip_minibatch_ratio == 2


def test_the_gallery_has_every_shipped_recipe() -> None:
    text = (Path(__file__).parents[4] / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert [name for name in recipe_names() if f"`{name}`" not in text] == []


def test_a_mapping_for_a_section_changes_the_keys_that_it_has() -> None:
    """The Python form `algorithm={"clip_high": 0.5}` does the same."""
    plain = load_recipe("quickstart", ["algorithm=dapo", "schedule=areal"])
    found = load_recipe(
        "quickstart",
        [
            "algorithm=dapo",
            "schedule=areal",
            "algorithm={clip_high: 0.5}",
            "schedule={max_staleness: 2}",
            "sampling={temperature: 0.5}",
        ],
    )
    assert found.algorithm.name == "dapo" and found.schedule.preset == "areal"
    assert found.schedule.resolved == plain.schedule.resolved.model_copy(update={"max_staleness": 2})
    assert found.sampling == plain.sampling.model_copy(update={"temperature": 0.5})
    renamed = load_recipe("quickstart", ["algorithm=dapo", "algorithm={name: grpo}"])
    assert renamed.algorithm == load_recipe("quickstart", ["algorithm=grpo"]).algorithm
    other = load_recipe("quickstart", ["task={format: {system: Be brief.}}"])
    assert other.task.reasoning_gym == plain.task.reasoning_gym
    assert other.task.format == plain.task.format.model_copy(update={"system": "Be brief."})


def test_a_mapping_for_a_source_changes_its_settings_unless_it_names_another() -> None:
    plain = load_recipe("quickstart").task
    found = load_recipe("quickstart", ["task={reasoning_gym: {heldout_size: 4}}"]).task
    assert plain.reasoning_gym is not None
    assert found.reasoning_gym == plain.reasoning_gym.model_copy(update={"heldout_size": 4})
    other = load_recipe("quickstart", ["task={files: {train: rows.jsonl}}"]).task
    assert other.reasoning_gym is None and other.files is not None
    assert other.format == PromptFormat(), "the recipe's template and replacements are for columns of its own rows"
