"""Sections of a recipe from the arguments of a program."""

from pathlib import Path

import pytest

from interlace import train
from interlace.core.errors import UserError
from interlace.rewards.base import label_of
from interlace.run.library import ProgramInputs
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import recipe_prompts

SIZES = {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 1}


def test_columns_of_a_file_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1", "reward_model": {"ground_truth": "2"}}\n')
    columns = {"prompt": "question", "answer": "reward_model.ground_truth"}
    given = ProgramInputs(model="tiny:micro", data=str(path), columns=columns, reward="exact")
    [prompt] = recipe_prompts(given.sections(tmp_path, SIZES).recipe()).train
    assert (prompt.text, prompt.answer) == ("1+1", "2")


def test_columns_of_a_data_set_of_the_hub_are_mapped(tmp_path: Path) -> None:
    given = ProgramInputs(model="tiny:micro", data="hub:owner/name", columns={"prompt": "question"}, reward="exact")
    assert given.sections(tmp_path, SIZES).recipe().task.columns == {"prompt": "question"}


def test_columns_of_generated_questions_are_refused(tmp_path: Path) -> None:
    given = ProgramInputs(model="tiny:micro", data="number_sorting", columns={"prompt": "question"}, reward="exact")
    with pytest.raises(UserError, match="is a dataset of reasoning-gym"):
        given.sections(tmp_path, SIZES)


@pytest.mark.parametrize(
    ("settings", "sizes"), [({}, (8, 8)), ({"algorithm": "sft"}, (8, 1)), ({"samples_per_prompt": 4}, (8, 4))]
)
def test_without_a_recipe_a_step_has_a_size(
    tmp_path: Path, settings: dict[str, object], sizes: tuple[int, int]
) -> None:
    given = ProgramInputs(model="tiny:micro", data="rows.jsonl")
    recipe = given.sections(tmp_path, {"steps": 3, **settings}, has_completions=True).recipe()
    assert (recipe.prompts_per_step, recipe.samples_per_prompt) == sizes


def test_a_list_of_rewards_replaces_the_reward_of_a_recipe(tmp_path: Path) -> None:
    def brief(response: str) -> float:
        return 1.0 / (1 + len(response))

    for given in (["exact", (brief, 0.1)], {"parts": ["exact", {"name": "exact", "label": "brief", "weight": 0.1}]}):
        found = ProgramInputs(reward=given).sections(tmp_path, {}).recipe(load_recipe("quickstart")).reward
        assert found is not None
        assert (found.name, [(label_of(part), part.weight) for part in found.parts]) == (
            "sum",
            [("exact", 1.0), ("brief", 0.1)],
        )
        assert (found.tag, found.correct) == (None, 1.0), "settings of the recipe's single reward remain"


def test_a_recipe_may_leave_its_sizes_to_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    Path("partial.yaml").write_text("{model: tiny:micro, task: rows.jsonl, sampling: {max_new_tokens: 4}}")
    sizes = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2}
    run = train("partial.yaml", reward=lambda response: float(len(response)), quiet=True, **sizes)
    assert (run.folder / "metrics.jsonl").read_text().count("\n") == 1
    with pytest.raises(UserError, match="missing key 'steps'"):
        train("partial.yaml", quiet=True)
