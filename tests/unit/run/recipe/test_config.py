"""A recipe is short, and its configuration contains every setting."""

from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.run.recipe.config import Recipe
from interlace.schedule.presets import load_schedule

SMALLEST: dict[str, object] = {
    "model": "tiny:micro",
    "task": "number_sorting",
    "reward": "reasoning_gym",
    "steps": 3,
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
}


def recipe(**changes: object) -> Recipe:
    return Recipe.parse({**SMALLEST, **changes})


def test_one_word_stands_for_a_section() -> None:
    found = recipe(algorithm="grpo", schedule="one-step-off", cluster="local")
    assert found.model.path == "tiny:micro"
    assert found.task.reasoning_gym is not None
    assert found.task.reasoning_gym.name == "number_sorting"
    assert (found.reward.name, found.algorithm.name, found.cluster.backend) == ("reasoning_gym", "grpo", "local")
    assert found.schedule.resolved == load_schedule("one-step-off")


@pytest.mark.parametrize("name", ["questions.jsonl", "folder/questions.parquet"])
def test_a_task_that_ends_like_a_file_is_one(name: str) -> None:
    task = recipe(task=name).task
    assert task.files is not None
    assert task.files.train == name


def test_settings_of_an_algorithm_stand_beside_its_name() -> None:
    found = recipe(algorithm={"name": "grpo", "clip_high": 0.3})
    assert found.algorithm.settings.model_dump()["clip_high"] == 0.3
    assert found.algorithm == recipe(algorithm={"clip_high": 0.3}).algorithm  # GRPO unless another is named


def test_fields_of_a_schedule_change_its_preset() -> None:
    found = recipe(schedule={"preset": "one-step-off", "max_staleness": 2})
    assert found.schedule.preset == "one-step-off"
    assert found.schedule.resolved == load_schedule("one-step-off", {"max_staleness": 2})


def test_a_change_to_one_part_of_a_preset_leaves_its_other_parts(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("granularity: sample\nplacement: {rollout: 0-50%}\n")
    changed = recipe(
        schedule={
            "preset": str(mine),
            "granularity": {"reward": "group"},
            "placement": {"rollout": {"devices_per_instance": 2}},
        }
    )
    dumped = changed.schedule.model_dump(mode="json")
    assert dumped["granularity"] == {
        "env": "sample",
        "reward": "group",
        "reference": "sample",
        "critic": "sample",
        "actor": "sample",
    }
    assert dumped["placement"]["rollout"] == {"devices": "0-50%", "devices_per_instance": 2}


def test_a_schedule_with_every_field_given_does_not_need_its_preset_any_more(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("max_staleness: 3\n")
    before = recipe(schedule=str(mine))
    mine.unlink()
    assert Recipe.parse(before.model_dump(mode="json")) == before


def test_what_was_dumped_is_read_back() -> None:
    found = recipe(
        algorithm={"name": "grpo", "clip_low": 0.1, "off_policy": {"correction": "mask"}},
        schedule={"preset": "one-step-off", "max_staleness": 2},
        warmup={"steps": 2, "demonstrations": {"style": "sorting_habits", "settings": {"work_share": 0.5}}},
        sampling={"stop": ["a", "b"], "logit_bias": [[3, 0.5]]},
        logging={"loggers": ["tensorboard"]},
    )
    assert Recipe.parse(found.model_dump(mode="json")) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "grop"}, "unknown algorithm 'grop'. Did you mean 'grpo'"),
        (
            {"algorithm": {"name": "grpo", "clip": 1}},
            "algorithm grpo: unknown key 'clip'. Did you mean 'clip_high' or 'clip_low'",
        ),
        ({"algorithm": 3}, "algorithm = 3: write a name, or a mapping with `name`"),
        ({"algorithm": {"name": 3}}, "algorithm.name = 3: write a name"),
        ({"schedule": "one-step-of"}, "unknown schedule 'one-step-of'. Did you mean 'one-step-off'"),
        ({"schedule": {"max_stalenes": 1}}, "unknown key 'max_stalenes'. Did you mean 'max_staleness'"),
        ({"schedule": {"pipeline_depth": 2}}, r"pipeline_depth \(2.0\) is above max_staleness"),
        ({"schedule": {"dispatch": "random"}}, "unknown dispatch policy 'random'"),
        ({"cluster": "sim"}, "cluster.backend = 'sim': there is no such back end.*local.*interlace simulate"),
        ({"task": {}}, "give one source of prompts"),
        ({"optimizer": {"schedule": "cosine"}}, "needs total_steps"),
        ({"warmup": {"steps": 0}}, "warmup.steps = 0"),
        ({"seed": 99999999999999999999}, "seed = 99999999999999999999: it must be less than 4294967296"),
        ({"model": {"path": "tiny:micro", "seed": 1 << 64}}, "model.seed = .* less than 4294967296"),
        ({"sampling": {"temperature": 1e-39}}, "sampling.temperature = 1e-39: .* set it to 1e-06 or more, or to 0"),
        ({"evaluation": {"temperature": 1e-39}}, "evaluation.temperature = 1e-39: it must be 1e-06 or more"),
        ({"keep_checkpoints": 0}, "keep_checkpoints = 0: it must be 1 or more"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe(**changes)
