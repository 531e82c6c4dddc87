"""`interlace.train` in a program with an event loop, such as a notebook."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import interlace
from interlace.core.errors import UserError
from interlace.observe.run_folder import RunFolder


def test_a_schedule_is_planned_while_the_event_loop_of_a_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile of the recipe runs a loop, which raised RuntimeError on the thread of another loop."""

    def plan(*_: object) -> None:
        asyncio.run(asyncio.sleep(0))
        raise UserError("planned")

    monkeypatch.setattr("interlace.cli.planning.plan_at_start", plan)

    async def run_cell() -> None:
        interlace.train("quickstart", folder=tmp_path, schedule="auto", quiet=True)

    with pytest.raises(UserError, match="planned"):
        asyncio.run(run_cell())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"overrides": None}, r"overrides is None: give a list of texts"),
        ({"overrides": 3}, r"overrides is 3: give a list of texts"),
        ({"overrides": [("steps", 3)]}, r"overrides is \[\('steps', 3\)\]: give a list of texts"),
        ({"folder": None}, r"folder is None: give the path"),
        ({"folder": 3}, r"folder is 3: give the path"),
    ],
)
def test_overrides_and_folders_of_another_type_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        interlace.train("quickstart", **arguments)


def test_a_reward_of_another_type_leaves_the_run_that_was_to_be_replaced(tmp_path: Path) -> None:
    """The files of the earlier run were deleted, and the reward function was called afterwards."""
    earlier = RunFolder.create(tmp_path, "mine").path
    (earlier / "config.yaml").write_text("steps: 3\n")
    (earlier / "metrics.jsonl").write_text('{"step": 1}\n')
    rows = [{"prompt": f"{number}+1=", "answer": f"{number + 1}"} for number in range(4)]

    def train() -> None:
        interlace.train(
            model="tiny:micro", data=rows, reward=lambda response: None, steps=1, prompts_per_step=2,
            samples_per_prompt=2, name="mine", folder=tmp_path, overwrite=True, quiet=True,
        )  # fmt: skip

    async def run_cell() -> None:
        train()

    for call in (train, lambda: asyncio.run(run_cell())):
        with pytest.raises(UserError, match="returned None"):
            call()
    assert (earlier / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_recipe_by_keyword_is_refused_with_the_form_of_the_call(tmp_path: Path) -> None:
    """It was an unknown key without advice."""
    settings: dict[str, Any] = {"recipe": "quickstart"}
    with pytest.raises(UserError, match=r"the recipe is the first argument, without a name: interlace\.train"):
        interlace.train(folder=tmp_path, **settings)


def test_a_command_in_an_error_keeps_its_form_in_a_program(tmp_path: Path) -> None:
    """Its option was written as an argument of Python."""
    with pytest.raises(UserError, match="`interlace compare --cluster sim`"):
        interlace.train("quickstart", folder=tmp_path, cluster="sim")
