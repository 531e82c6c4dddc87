"""`interlace.train` from a program and from a notebook: a model, rows, and any function as the reward."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import interlace
from interlace.core.errors import UserError
from interlace.jobs.library import Settings
from interlace.recipes.config import Recipe
from interlace.recipes.load import load_recipe
from tests.support.reward_functions import length

ROWS = [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(6)]
SMALL: Settings = {
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "sampling": {"max_new_tokens": 4},
    "cluster": {"devices": "cpu:2"},
    "rollout": {"max_running": 8, "max_tokens": 512},
}


def test_a_lambda_is_a_reward(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    found = interlace.train(
        model="tiny:micro",
        data=ROWS,
        reward=lambda prompt, response, answer, metadata: seen.append((prompt, answer)) or len(response) % 2 == 0,
        heldout_size=2,
        name="mine",
        folder=tmp_path,
        quiet=True,
        optimizer={"lr": 1e-3},
        **SMALL,
    )
    assert found.folder == tmp_path / "mine" and len(found.rewards) == 2
    assert all(0 <= reward <= 1 for reward in found.rewards), "a verdict counts as 1 or 0"
    assert found.report.after is not None and found.report.after.num_prompts == 2
    assert set(seen) == {(row["prompt"], row["answer"]) for row in ROWS}
    assert found.checkpoint is not None
    AutoModelForCausalLM.from_pretrained(found.checkpoint)


def test_in_a_notebook_where_a_loop_runs_already(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]

    async def cell() -> interlace.TrainedRun:
        return interlace.train(model="tiny:micro", data=rows, reward=length, folder=tmp_path, quiet=True, **SMALL)

    found = asyncio.run(cell())
    assert found.report.done_steps == 2 and found.folder.name == "run"
    recipe = load_recipe(str(found.folder / "config.yaml"))
    assert recipe.reward is not None and recipe.reward.name == "tests.support.reward_functions:length"
    assert recipe.reward.workers == 1, "a function that can be imported is scored apart, under the time limit"
    assert recipe.task.files is not None and json.loads(Path(recipe.task.files.train).read_text().splitlines()[0])


def test_what_cannot_work_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    def refusal(**changed: object) -> str:
        arguments = {"model": "tiny:micro", "data": ROWS, "reward": lambda *_: 1.0, "folder": tmp_path / "runs"}
        with pytest.raises(UserError) as caught:
            interlace.train(**{**arguments, **SMALL, **changed})  # type: ignore[arg-type]
        return str(caught.value)

    assert "steps = 'three': it must be a whole number" in refusal(steps="three")
    assert "cannot be called as f(prompt, response, answer, metadata)" in refusal(reward=lambda response: 1.0)
    assert "other processes cannot find" in refusal(cluster="ray")
    assert "cannot be written as JSON" in refusal(data=[{"prompt": object()}])
    assert not [path for path in (tmp_path / "runs").iterdir() if path.name != "data"]

    async def judged(prompt: str, response: str, answer: str, metadata: object) -> float:
        return 1.0

    assert "put it in a module" in refusal(reward=judged)


def test_a_run_whose_function_is_gone_says_so(tmp_path: Path) -> None:
    code = "from interlace.rewards.base import load_reward; load_reward('interlace.rewards.given:function_0')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "was a function of the program that started the run" in done.stderr


def test_its_settings_are_those_of_a_recipe() -> None:
    assert set(Settings.__annotations__) == set(Recipe.model_fields) - {"model", "task", "reward"}
