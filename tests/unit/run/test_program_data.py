"""A mixture that a program gives is the recipe's mixture, or is refused with the place of the mistake."""

import asyncio
import json
import math
from pathlib import Path

import pytest
from datasets import Dataset
from pandas import DataFrame

from interlace.algorithms.maxrl import MaxRL
from interlace.core.errors import UserError
from interlace.data.mixture import create_sampler
from interlace.observe.run_identity import follow_moved_file, may_change
from interlace.rewards.config import GIVEN
from interlace.rewards.scorer import try_reward
from interlace.run.library import ProgramInputs
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.prompts import recipe_prompts
from tests.support.reward_functions import size

ROWS = [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(4)]
SIZES = {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 1}


def recipe(data: object, root: Path, reward: object = size, **inputs: object) -> Recipe:
    given = ProgramInputs(model="tiny:micro", data=data, reward=reward, **inputs)  # type: ignore[arg-type]
    return given.sections(root, SIZES).recipe()


def test_rows_and_files_are_sources_with_names_and_weights(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text('{"prompt": "w", "answer": ""}\n{"prompt": "x", "answer": ""}\n')
    data = {
        "table": (DataFrame(ROWS), 3),
        "set": (Dataset.from_list(ROWS), 0.5),
        "words": (str(tmp_path / "words.jsonl"), 1),
        "gym": ("chain_sum", 1),
    }
    found = recipe(data, tmp_path, heldout_size=1)
    parts = found.task.mixture
    assert [(part.label, part.weight) for part in parts] == [("table", 3), ("set", 0.5), ("words", 1), ("gym", 1)]
    assert parts[3].reasoning_gym is not None and parts[3].reasoning_gym.heldout_size == 1
    prompts = recipe_prompts(found)
    assert {prompt.text for prompt in prompts.train if prompt.source == "set"} < {row["prompt"] for row in ROWS}
    assert sorted(prompt.source for prompt in prompts.heldout) == ["gym", "set", "table", "words"]


def test_held_out_sets_are_rows_of_the_program_too(tmp_path: Path) -> None:
    """A file was needed for each, although `data` takes rows."""
    (tmp_path / "words.jsonl").write_text('{"prompt": "w", "answer": "1"}\n')
    asked = [{"question": "7+7", "answer": "14"}]
    sets = {
        "easy": DataFrame(ROWS[:2]),
        "hard": {"source": asked, "columns": {"prompt": "question"}},
        "words": tmp_path / "words.jsonl",
        "gym": {"reasoning_gym": {"name": "chain_sum", "train_size": 3}},
    }
    given = ProgramInputs(model="tiny:micro", data=[{"prompt": "9+9", "answer": "18"}], reward=size)
    sections = given.sections(tmp_path, {**SIZES, "task": {"heldout_sets": sets}})
    prompts = recipe_prompts(sections.recipe())
    assert [prompt.source for prompt in prompts.heldout] == ["easy", "easy", "hard", "words", "gym", "gym", "gym"]
    assert [prompt.text for prompt in prompts.heldout][:3] == ["0+1", "1+1", "7+7"]
    assert [*sections.rows.values()] == ["task[\"heldout_sets\"]['easy']", "task[\"heldout_sets\"]['hard']", "data"]
    with pytest.raises(UserError, match=r'task\["heldout_sets"\]\[\'hard\'\]\[0\] has no column \'prompt\''):
        given.sections(tmp_path, {**SIZES, "task": {"heldout_sets": {"hard": asked}}})


def test_any_name_of_a_held_out_set_gives_a_file_beside_the_others(tmp_path: Path) -> None:
    """A name with a slash named a folder, also one outside of the data, which a moved run did not find."""
    sets = {"sums, hard": ROWS[:1], "../../sums": ROWS[1:2]}
    given = ProgramInputs(model="tiny:micro", data=ROWS[2:], reward=size)
    task = given.sections(tmp_path / "old", {**SIZES, "task": {"heldout_sets": sets}}).recipe().task
    assert [*task.heldout_sets] == [*sets]
    files = [part.files.train for part in task.heldout_sets.values() if part.files is not None]
    assert [Path(file).name for file in files] == ["sums-hard.jsonl", "..-..-sums.jsonl"]
    assert all(Path(file).parent.parent == tmp_path / "old" / "data" for file in files)
    (tmp_path / "old").rename(tmp_path / "new")
    assert all(Path(follow_moved_file(file, tmp_path / "new")).is_file() for file in files)


def test_columns_that_a_row_cannot_store_are_left_out(tmp_path: Path) -> None:
    rows = [{**row, "picture": b"png"} for row in ROWS]
    sizes = {**SIZES, "task": {"omit": ["picture"]}}
    single = ProgramInputs(model="tiny:micro", data=rows, reward=size).sections(tmp_path, sizes).recipe()
    mixed = recipe({"set": {"source": rows, "omit": ["picture"]}}, tmp_path)
    for found in (single, mixed):
        assert all("picture" not in prompt.metadata for prompt in recipe_prompts(found).train)


def test_columns_that_are_left_out_do_not_make_a_row_one_of_another_objective(tmp_path: Path) -> None:
    rows = [{**row, "chosen": "a", "rejected": "b"} for row in ROWS]
    sizes = {**SIZES, "task": {"omit": ["chosen", "rejected"]}}
    found = ProgramInputs(model="tiny:micro", data=rows, reward=size).sections(tmp_path, sizes).recipe()
    assert [prompt.text for prompt in recipe_prompts(found).train] == [row["prompt"] for row in ROWS]


def test_a_source_has_its_reward_and_columns(tmp_path: Path) -> None:
    asked = [{"question": "1+1", "truth": {"value": "2"}, "level": 3}]
    columns = {"prompt": "question", "answer": "truth.value"}
    (tmp_path / "asked.jsonl").write_text(json.dumps(asked[0]))
    data = {
        "rows": {"source": asked, "columns": columns, "reward": lambda response, level: float(level)},
        "file": {"source": str(tmp_path / "asked.jsonl"), "columns": columns, "weight": 2, "reward": "exact"},
    }
    found = recipe(data, tmp_path, None)
    prompts = [(prompt.source, prompt.text, prompt.answer) for prompt in recipe_prompts(found).train]
    assert prompts == [("rows", "1+1", "2"), ("file", "1+1", "2")]
    assert [part.weight for part in found.task.mixture] == [1, 2]
    assert found.task.rewards["file"].name == "exact" and found.task.rewards["rows"].name.startswith(GIVEN)


@pytest.mark.parametrize(
    ("data", "sources"),
    [
        (ROWS, {"data"}),
        ({"math": (ROWS, 1), "v1.1": (ROWS, 1)}, {"math", "v1.1"}),
        ([{**row, "data_source": "openai/gsm8k"} for row in ROWS], {"openai/gsm8k"}),
    ],
)
def test_verls_data_source_is_the_name_that_the_user_gave(tmp_path: Path, data: object, sources: set[str]) -> None:
    """It was a hash of the rows."""
    found: list[str] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
        found.append(data_source)
        return 1.0

    made = recipe(data, tmp_path, compute_score)
    for prompt in recipe_prompts(made).train:
        asyncio.run(try_reward(made.reward, prompt))
    assert {*found} == sources


def test_a_source_has_its_algorithm(tmp_path: Path) -> None:
    """A class, a name, or changed settings of the recipe's algorithm."""
    given: list[object] = [MaxRL, "dapo", {"clip_high": 0.3}]
    found = recipe({f"s{n}": {"source": ROWS, "algorithm": own} for n, own in enumerate(given)}, tmp_path)
    names = [part.algorithm.name for part in found.task.mixture if part.algorithm]
    assert names == ["interlace.algorithms.maxrl:MaxRL", "dapo", "grpo"]
    assert found.algorithm.name == "grpo"


def test_a_resumed_program_may_rename_the_reward_of_a_source() -> None:
    for key in ("reward.name", "task.mixture.1.reward.name", "task.mixture.1.reward.parts.0.name"):
        assert may_change(key, f"{GIVEN}function_0", program_names=GIVEN)
    assert not may_change("task.mixture.1.reward.name", "exact", program_names=GIVEN)
    assert not may_change("task.mixture.1.weight", 1.0, program_names=GIVEN)


def test_a_source_may_begin_with_the_weight_0(tmp_path: Path) -> None:
    """A curriculum starts it later."""
    made = recipe({"easy": (ROWS, 1), "hard": (ROWS, 0)}, tmp_path)
    sampler = create_sampler(made.task, recipe_prompts(made).train, seed=0)
    prompts = recipe_prompts(made).train
    assert {prompts[sampler.draw(number).position].source for number in range(40)} == {"easy"}
    sampler.set_weights({"easy": 0, "hard": 1}, 40)
    assert {prompts[sampler.draw(number).position].source for number in range(40, 60)} == {"hard"}
    with pytest.raises(UserError, match=r"all sources of mixture \(easy, hard\) have the weight 0"):
        recipe({"easy": (ROWS, 0), "hard": (ROWS, 0)}, tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"a": (ROWS, -1), "b": (ROWS, 1)}, r"data\['a'\] has the weight -1, and a weight is .* 0 or more"),
        ({"a": (ROWS, math.inf), "b": (ROWS, 1)}, r"data\['a'\] has the weight inf"),
        ({"a": (ROWS, 1), "b": (ROWS, float("nan"))}, r"data\['b'\] has the weight nan"),
        ({"a": (ROWS, "3")}, r"data\['a'\] has the weight '3'"),
        ({"a": (ROWS, 1), "b": ([], 1)}, r"data\['b'\] is empty"),
        ({"a": (ROWS, 1), "b": ([{"q": 1}], 1)}, r"data\['b'\]\[0\] has no column 'prompt'"),
        ({"a": (3, 1)}, r"data\['a'\] is of type int"),
        ({"a": (ROWS, 1), "b": ROWS}, r"data\['b'\] is a list, and a source .* is a pair \(data, weight\)"),
        ({"a/b": (ROWS, 1)}, r"data\['a/b'\]: the name of a source may have letters"),
        ({"a": {"source": ROWS, "name": "c"}}, r"data\['a'\] has the name 'c'.*Leave `name` out"),
        ({"a": {"source": ROWS, "wieght": 2}}, r"unknown key 'task.mixture.0.wieght'.*'weight'"),
        ({"a": {"source": ROWS, "columns": "q"}}, r"data\['a'\]: columns is 'q'"),
        ({"a": ROWS, "b": ROWS}, r"give one split of it.*A mixture has the form \{NAME: \(rows, weight\)\}"),
    ],
)
def test_a_mistake_names_the_source(tmp_path: Path, data: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        recipe(data, tmp_path)


def test_columns_of_the_whole_mixture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'each of its sources has its own: .*"columns"'):
        recipe({"a": (ROWS, 1)}, tmp_path, columns={"prompt": "question"})


def test_a_function_of_the_program_cannot_score_a_source_on_ray(tmp_path: Path) -> None:
    data = {"a": {"source": ROWS, "reward": lambda response: 1.0}, "b": (ROWS, 1)}
    given = ProgramInputs(model="tiny:micro", data=data, reward=size)
    with pytest.raises(UserError, match="a function of this program alone"):
        given.sections(tmp_path, {**SIZES, "cluster": {"backend": "ray", "devices": "cpu:2"}}).recipe()
