"""Sections of a recipe from the arguments of a program."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from pandas import DataFrame

from interlace import train
from interlace.api.train import GivenRun
from interlace.core.errors import UserError
from interlace.data.config import PromptFormat
from interlace.models.tiny import build_tiny
from interlace.rewards.config import label_of
from interlace.rewards.signature import ScoreRequest, reward_call
from interlace.run.library import ProgramInputs, trains_on_rows
from interlace.run.recipe.config import Recipe
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


def test_a_column_of_a_data_frame_is_a_number(tmp_path: Path) -> None:
    columns: Any = {"prompt": 0, "answer": 1}
    given = ProgramInputs(model="tiny:micro", data=DataFrame([["1+1", "2"]]), columns=columns, reward="exact")
    [prompt] = recipe_prompts(given.sections(tmp_path, SIZES).recipe()).train
    assert (prompt.text, prompt.answer) == ("1+1", "2")


def test_a_setting_may_be_a_path(tmp_path: Path) -> None:
    data = {"mine": {"files": {"train": tmp_path / "a.jsonl"}, "weight": 2.0}}
    task = {"mixture": [{"name": name, **part} for name, part in data.items()]}
    settings = {**SIZES, "task": task, "reference": {"model": tmp_path / "teacher"}}
    found = ProgramInputs(model={"path": tmp_path / "model"}, reward="exact").sections(tmp_path, settings).recipe()
    assert (found.model.path, found.reference.model.path) == (str(tmp_path / "model"), str(tmp_path / "teacher"))
    assert found.task.mixture[0].files.train == str(tmp_path / "a.jsonl")


def test_a_type_of_torch_is_a_setting(tmp_path: Path) -> None:
    given = ProgramInputs(model={"path": "tiny:micro", "dtype": torch.bfloat16}, data="chain_sum", reward="exact")
    assert given.sections(tmp_path, SIZES).recipe().model.dtype == "bfloat16"


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

    named = {"name": "exact", "label": "brief"}
    for given in (
        ["exact", (brief, 0.1)],
        ["exact", {"name": brief, "weight": 0.1}],
        ["exact", (named, 0.1)],
        {"parts": ["exact", (brief, 0.1)]},
        {"parts": ["exact", {**named, "weight": 0.1}]},
    ):
        found = ProgramInputs(reward=given).sections(tmp_path, {}).recipe(load_recipe("quickstart")).reward
        assert found is not None
        assert (found.name, [(label_of(part), part.weight) for part in found.parts]) == (
            "sum",
            [("exact", 1.0), ("brief", 0.1)],
        )
        assert (found.tag, found.correct) == (None, 1.0), "settings of the recipe's single reward remain"


def test_a_part_of_a_reward_with_two_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"two weights, 2\.0 in its mapping and 0\.5 beside it"):
        ProgramInputs(reward=["exact", ({"name": "exact", "weight": 2.0}, 0.5)]).sections(tmp_path, {})


def test_a_list_of_rewards_has_parts_and_a_part_may_be_a_list_with_its_weight(tmp_path: Path) -> None:
    given = ProgramInputs(model="tiny:micro", data="chain_sum", reward=["exact", ["math_verify", 0.5]])
    recipe = given.sections(tmp_path, SIZES).recipe()
    assert recipe.reward is not None and [part.weight for part in recipe.reward.parts] == [1.0, 0.5]
    with pytest.raises(UserError, match=r"reward is an empty list: give functions"):
        ProgramInputs(reward=[]).sections(tmp_path, SIZES)
    with pytest.raises(UserError, match=r"a part of reward is \['exact', 'math_verify'\]: a part is a function"):
        ProgramInputs(reward=[["exact", "math_verify"]]).sections(tmp_path, SIZES)


def test_a_module_of_torch_is_no_reward(tmp_path: Path) -> None:
    """Its call takes any arguments, so the first step failed whole."""
    for reward in (torch.nn.Linear(2, 1), [(torch.nn.Linear(2, 1), 0.5)]):
        with pytest.raises(UserError, match=r'a Linear, a module of torch.*"name": "model", "model": FOLDER'):
            ProgramInputs(reward=reward).sections(tmp_path, SIZES)


def test_a_class_or_function_is_a_setting_by_its_name(tmp_path: Path) -> None:
    from interlace.algorithms.dapo import DAPO
    from tests.support.reward_functions import size

    episode = {"name": "tools", "tools": ["calculator", size]}
    found = ProgramInputs().sections(tmp_path, {"algorithm": DAPO, "episode": episode}).values
    assert found["algorithm"] == "interlace.algorithms.dapo:DAPO"
    assert found["episode"] == {"name": "tools", "tools": ["calculator", "tests.support.reward_functions:size"]}

    class Local(DAPO):
        pass

    with pytest.raises(UserError, match=r"A class is named as package\.module:Class"):
        ProgramInputs().sections(tmp_path, {"algorithm": Local}).recipe(load_recipe("quickstart"))


def test_a_recipe_may_leave_its_sizes_to_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    Path("partial.yaml").write_text("{model: tiny:micro, task: rows.jsonl, sampling: {max_new_tokens: 4}}")
    sizes = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2}
    run = train("partial.yaml", reward=lambda response: float(len(response)), quiet=True, **sizes)
    assert (run.folder / "metrics.jsonl").read_text().count("\n") == 1
    with pytest.raises(UserError, match="missing key 'steps'"):
        train("partial.yaml", quiet=True)


def test_other_keys_of_the_task_apply_to_data_of_the_program(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1", "answer": "2"}]
    task = {"max_prompt_tokens": 5, "overlong": "drop", "format": {"system": "Be brief."}}

    def join(data: object, task: object, base: str | None = None) -> Recipe:
        given = ProgramInputs(model="tiny:micro", data=data, reward="exact")
        return given.sections(tmp_path, {**SIZES, "task": task}).recipe(load_recipe(base) if base else None)

    found = join(rows, task).task
    assert found.files is not None and (found.max_prompt_tokens, found.overlong) == (5, "drop")
    assert found.format.system == "Be brief."
    other = join(rows, task, "quickstart").task.format  # the recipe's template names columns of its own rows
    assert other == PromptFormat(system="Be brief.")
    for wrong in ("other.jsonl", {"files": {"train": "other.jsonl"}}, {"columns": {"answer": "a"}}):
        with pytest.raises(UserError, match=r"data and task.* are both given"):
            join(rows, wrong)
    with pytest.raises(UserError, match="max_prompt_tokns"):
        join(rows, {"max_prompt_tokns": 5})


def test_settings_of_the_algorithm_of_a_recipe_keep_its_kind_of_rows(tmp_path: Path) -> None:
    assert trains_on_rows("dpo", {"algorithm": {"loss": "ipo"}})
    assert not trains_on_rows("quickstart", {"algorithm": {"clip_high": 0.3}})


@pytest.mark.parametrize("answer", [2, 2.5, True, "2"])
def test_a_reward_gets_the_answer_with_the_type_of_its_column(tmp_path: Path, answer: object) -> None:
    given = ProgramInputs(model="tiny:micro", data=[{"prompt": "1+1", "answer": answer}], reward="exact")
    [prompt] = recipe_prompts(given.sections(tmp_path, SIZES).recipe()).train
    request = ScoreRequest(prompt="1+1", response="2", answer=prompt.answer, metadata=prompt.metadata)

    def typed(response: str, answer: object) -> bool:
        return answer == 2

    def declared(response: str, answer: str) -> bool:
        return isinstance(answer, str)

    def batch(completions: list[str], answer: list[object], **columns: object) -> list[bool]:
        return [each == 2 for each in answer]

    scores = [asyncio.run(reward_call(function).scores([request]))[0] for function in (typed, batch, declared)]
    assert scores == [answer == 2, answer == 2, True]


def test_an_answer_that_is_left_out_is_a_column_of_the_row(tmp_path: Path) -> None:
    def count(response: str, answer: list[str]) -> float:
        return float(len(answer))

    rows, columns = [{"prompt": "1+1", "answer": ["2", "two"]}], {"answer": None}
    given = ProgramInputs(model="tiny:micro", data=rows, columns=columns, reward=count)
    [prompt] = recipe_prompts(given.sections(tmp_path, SIZES).recipe()).train
    assert (prompt.answer, prompt.metadata["answer"]) == ("", ["2", "two"])
    request = ScoreRequest(prompt="1+1", response="", answer="", metadata=prompt.metadata)
    assert reward_call(count).missing(request) is None
    assert asyncio.run(reward_call(count).scores([request])) == [2.0]


@pytest.mark.parametrize(
    ("inputs", "settings", "words"),
    [
        ({"columns": ["prompt"]}, {}, r"columns is \['prompt'\]: give a mapping"),
        ({"columns": {"prompt": ["question"]}}, {}, r"columns has 'prompt': \['question'\], and it maps a name to"),
        ({"columns": {"prompt": True}}, {}, "columns has 'prompt': True, and it maps a name to"),
        ({}, {"optimizer.lr": 1e-3}, r"In Python a section is a dictionary: optimizer=\{'lr': ...\}"),
        ({}, {"actor.lora.rank": 4}, r"In Python a section is a dictionary: actor=\{'lora': \{'rank': ...\}\}"),
        ({}, {"algorithm": type("Own", (), {})}, "A class is named as package.module:Class"),
    ],
)
def test_a_mistake_of_a_program_is_answered_in_its_words(
    tmp_path: Path, inputs: dict[str, Any], settings: dict[str, object], words: str
) -> None:
    rows = [{"prompt": "1+1", "answer": "2"}]
    with pytest.raises(UserError, match=words):
        ProgramInputs(model="tiny:micro", data=rows, reward="exact", **inputs).sections(
            tmp_path, {**SIZES, **settings}
        ).recipe()


def test_a_folder_of_runs_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file", encoding="utf-8")
    given = ProgramInputs(model="tiny:micro", data=[{"prompt": "1+1", "answer": "2"}], reward="exact")
    with pytest.raises(UserError, match="cannot write the rows"):
        given.sections(tmp_path / "runs", SIZES)


def test_a_model_object_after_its_tokenizer_is_named(tmp_path: Path) -> None:
    model, tokenizer = build_tiny("micro", 0)
    with pytest.raises(UserError, match=r"wrong order: give model=\(model, tokenizer\)"):
        ProgramInputs(model=(tokenizer, model)).sections(tmp_path, SIZES)


def test_a_number_of_devices_needs_their_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cluster.devices = 2: name the kind .* cpu:2"):
        load_recipe("quickstart", ["cluster.devices=2"])


def test_an_override_of_the_task_applies_to_the_data_of_the_program(tmp_path: Path) -> None:
    overrides = ["task.max_prompt_tokens=100", "task.format.system=Be brief.", "task.sampler=solve_rate"]
    given = ProgramInputs(data=[{"prompt": "1+1", "answer": "2"}], reward="exact")
    sections = given.sections(tmp_path, {})
    run = GivenRun(recipe="one-gpu", overrides=tuple(overrides), sections=sections)
    found = run.settings().task
    assert (found.max_prompt_tokens, found.format.system, found.sampler.name) == (100, "Be brief.", "solve_rate")
    assert found.files is not None and found.reasoning_gym is None
    rivals = GivenRun(recipe="one-gpu", overrides=("task=rows.jsonl",), sections=sections)
    with pytest.raises(UserError, match="the override task and data are both given"):
        rivals.settings()


def test_an_override_of_the_algorithm_decides_the_kind_of_rows() -> None:
    assert trains_on_rows("quickstart", {}, ["algorithm=sft", "reward=null", "samples_per_prompt=1"])
