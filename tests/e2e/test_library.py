"""`interlace.train` runs from a program and a notebook, with a model, rows, and any function as the reward."""

import asyncio
import gc
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import interlace
from interlace.core.errors import UserError
from interlace.models.tiny import build_tiny
from interlace.observe.jsonl import read_rows
from interlace.run.library import Settings
from interlace.run.program_model import save_model_object
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from tests.support import heap
from tests.support.library import ROWS, TINY
from tests.support.reward_functions import size


def test_a_lambda_is_a_reward(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    found = interlace.train(
        model="tiny:micro",
        data=ROWS,
        reward=lambda response, answer, prompt: seen.append((prompt, answer)) or len(response) % 2 == 0,
        heldout_size=2,
        name="mine",
        folder=tmp_path,
        quiet=True,
        optimizer={"lr": 1e-3},
        **TINY,
    )
    assert found.folder == tmp_path / "mine" and len(found.rewards) == 2
    assert all(0 <= reward <= 1 for reward in found.rewards), "a verdict counts as 1 or 0"
    assert found.outcome is not None
    assert found.outcome.after is not None and found.outcome.after.num_prompts == 2
    assert set(seen) == {(row["prompt"], row["answer"]) for row in ROWS}
    assert found.checkpoint is not None
    AutoModelForCausalLM.from_pretrained(found.checkpoint)


def test_a_run_that_a_signal_stopped_is_interrupted(tmp_path: Path) -> None:
    def interrupt(step: interlace.StepInfo) -> None:
        signal.raise_signal(signal.SIGINT)

    def stop(step: interlace.StepInfo) -> None:
        step.stop()

    for callback, is_interrupted in ((interrupt, True), (stop, False)):
        found = interlace.train(
            model="tiny:micro", data=ROWS, reward=size, folder=tmp_path, quiet=True, callbacks=[callback], **TINY
        )
        assert found.was_interrupted == is_interrupted and len(found.rewards) == 1
        assert ("1 of 2, interrupted" in str(found)) == ("1 of 2, interrupted" in found._repr_html_()) == is_interrupted
    assert not interlace.load_run("run", folder=tmp_path).was_interrupted


def test_a_run_continues_after_its_folder_was_moved(tmp_path: Path) -> None:
    model = build_tiny("micro", 0)
    given = {"model": model, "data": ROWS, "reward": size, "heldout_size": 2, "name": "mine", "quiet": True, **TINY}
    interlace.train(**given, folder=tmp_path / "old")  # type: ignore[arg-type]
    (tmp_path / "old").rename(tmp_path / "new")
    moved = {**given, "folder": tmp_path / "new", "resume": True, "steps": 3}
    assert interlace.load_run("mine", folder=tmp_path / "new").evaluate().num_prompts == 2
    assert len(interlace.train(**moved).rewards) == 3  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"with other settings \(data has other rows\)"):
        interlace.train(**{**moved, "data": ROWS[1:]})  # type: ignore[arg-type]


def test_dropped_prompts_and_steps_of_repeated_prompts_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS, {"prompt": "x" * 60, "answer": "0"}]
    task = {"max_prompt_tokens": 50, "overlong": "drop"}
    arguments = {**TINY, "prompts_per_step": 2 * len(rows), "steps": 1}
    interlace.train(model="tiny:micro", data=rows, reward=size, folder=tmp_path, task=task, **arguments)
    shown = capsys.readouterr().out
    assert "1 prompts have more than task.max_prompt_tokens tokens and were dropped." in shown
    assert f"and there are {len(ROWS)} prompts to train on: a step uses each about" in shown


def test_in_a_notebook_where_a_loop_runs_already(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]

    async def cell() -> interlace.TrainedRun:
        return interlace.train(model="tiny:micro", data=rows, reward=size, folder=tmp_path, quiet=True, **TINY)

    found = asyncio.run(cell())
    assert found.outcome is not None and found.outcome.done_steps == 2 and found.folder.name == "run"
    recipe = load_recipe(str(found.folder / "config.yaml"))
    assert recipe.reward is not None and recipe.reward.name == "tests.support.reward_functions:size"
    assert recipe.reward.workers == 1, "a function that can be imported is scored apart, under the time limit"
    assert recipe.task.files is not None and json.loads(Path(recipe.task.files.train).read_text().splitlines()[0])


def test_what_cannot_work_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    def refusal(**changed: object) -> str:
        arguments = {"model": "tiny:micro", "data": ROWS, "reward": lambda *_: 1.0, "folder": tmp_path / "runs"}
        with pytest.raises(UserError) as caught:
            interlace.train(**{**arguments, **TINY, **changed})  # type: ignore[arg-type]
        return str(caught.value)

    assert "steps = 'three': it must be a whole number" in refusal(steps="three")
    assert "data[0] has no 'levl', which reward" in refusal(reward=lambda response, levl: 1.0)
    assert "which only TRL's trainer passes" in refusal(reward=lambda completions, trainer_state: [1.0])
    assert "the reward function returned '1.0', which is not a number" in refusal(reward=lambda response: "1.0")
    assert "other processes cannot find" in refusal(cluster="ray")
    assert "which JSON cannot hold" in refusal(data=[{"prompt": object()}])
    assert not [path for path in (tmp_path / "runs").iterdir() if path.name != "data"]

    assert "data[1] has no 'answer'" in refusal(data=[ROWS[0], {"prompt": "1", "solution": "2"}], reward="exact")
    assert "interlace train dpo" in refusal(data=[{"prompt": "1", "chosen": "2", "rejected": "3"}])
    assert "model is of type int" in refusal(model=3)


def test_a_run_whose_function_is_gone_says_so(tmp_path: Path) -> None:
    """Another process finds no function of its own by the name, even if it gave as many functions."""
    give = "from interlace.rewards.given import name_of\nprint(name_of(lambda response: 1.0))\n"
    first = subprocess.run([sys.executable, "-c", give], capture_output=True, text=True, check=True)
    load = f"from interlace.rewards.base import load_reward\nload_reward({first.stdout.strip()!r})"
    done = subprocess.run([sys.executable, "-c", give + load], capture_output=True, text=True, check=False)
    assert "was a function of the program that started the run" in done.stderr


def test_its_settings_are_those_of_a_recipe() -> None:
    assert set(Settings.__annotations__) == set(Recipe.model_fields) - {"model", "task", "reward"}


def test_a_run_does_things(tmp_path: Path) -> None:
    """The life of a run from Python: columns, an async reward, a callback that stops it, resumption, the model."""

    async def judge(response: str, ground_truth: str) -> float:
        await asyncio.sleep(0)
        return float(ground_truth in response)

    def watch(step: interlace.StepInfo) -> None:
        step.log("mine/double", 2.0 * step.step)
        if step.step == 2:
            step.stop()

    rows = [{"question": row["prompt"], "reward_model": {"ground_truth": row["answer"]}} for row in ROWS]
    columns = {"prompt": "question", "answer": "reward_model.ground_truth"}
    small: Settings = {**TINY, "steps": 4}
    found = interlace.train(
        model="tiny:micro", data=rows, columns=columns, reward=[judge, ("exact", 0.5)], heldout_size=1, name="mine",
        folder=tmp_path, quiet=True, callbacks=[watch], **small,
    )  # fmt: skip
    assert list(found.metrics["mine/double"]) == [2.0, 4.0]
    assert {"reward/judge", "reward/exact"} <= set(found.metrics.columns)
    assert len(found.samples) == 2 * 4 and {"prompt", "response", "reward"} <= set(found.samples.columns)
    assert isinstance(found.generate("1+1", temperature=0), str) and len(found.generate(["1+1", "2+1"])) == 2
    assert found.evaluate().num_prompts == 1
    assert found.report().is_file() and "<svg" in found._repr_html_() and "2 of 4" in repr(found)
    found.save(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "optimizer").exists()
    with pytest.raises(UserError, match=r"cannot push run 'mine' to 'me/name'"):
        found.push_to_hub("me/name", token="hf_none")

    with pytest.raises(UserError, match=r"replace it \(overwrite=True\)"):
        interlace.train(model="tiny:micro", data=ROWS, reward="exact", name="mine", folder=tmp_path, **TINY)
    again = interlace.train(reward=[judge, ("exact", 0.5)], name="mine", folder=tmp_path, resume=True, quiet=True)
    assert len(again.rewards) == 4
    with pytest.raises(UserError, match="seed: 0 -> 1"):
        interlace.train(reward=[judge, ("exact", 0.5)], name="mine", folder=tmp_path, resume=True, seed=1)
    assert interlace.load_run("mine", folder=tmp_path).checkpoint == again.checkpoint


def test_a_tilde_is_the_home_folder_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    run = interlace.train(model="tiny:micro", data=ROWS, reward=size, folder="~/runs", quiet=True, **TINY)
    assert run.folder == tmp_path / "home" / "runs" / "run"
    assert run.save("~/saved").parent == Path(run.export("~/exported")).parent == tmp_path / "home"
    assert interlace.load_run("run", folder="~/runs").folder == interlace.load_run("~/runs/run").folder == run.folder
    assert load_recipe("~/runs/run/config.yaml") == run.recipe
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_search_for_cycles_leaves_out_the_objects_before_training(tmp_path: Path, algorithm: str) -> None:
    searched: list[int] = []
    given = {"reward": "exact"} if algorithm == "grpo" else {}
    heap.unfreeze()  # conftest.py has frozen objects, and a run leaves it at that
    interlace.train(
        model="tiny:micro", data=ROWS if given else [{**row, "completion": row["answer"]} for row in ROWS],
        algorithm=algorithm, folder=tmp_path, quiet=True, callbacks=[lambda _: searched.append(len(gc.get_objects()))],
        **given, **(TINY if given else {**TINY, "samples_per_prompt": 1}),
    )  # fmt: skip
    assert gc.get_freeze_count() == 0
    assert max(searched) < 0.2 * len(gc.get_objects())
    heap.freeze()


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_step_whose_callback_raises_is_saved(tmp_path: Path, algorithm: str) -> None:
    def broken(step: interlace.StepInfo) -> None:
        if step.step == 2:
            raise OSError("the server of the plots is gone")

    given = {"reward": "exact"} if algorithm == "grpo" else {}
    small = TINY if algorithm == "grpo" else {**TINY, "samples_per_prompt": 1}
    rows = [{**row, "completion": row["answer"]} for row in ROWS]
    with pytest.raises(interlace.InterlaceError, match="callback 'broken' raised OSError after step 2") as caught:
        interlace.train(
            model="tiny:micro", data=rows if algorithm == "sft" else ROWS, algorithm=algorithm, name="mine",
            folder=tmp_path, quiet=True, callbacks=[broken], **given, **{**small, "steps": 3},
        )  # type: ignore[arg-type]  # fmt: skip
    assert any("can be resumed" in note for note in caught.value.__notes__)
    found = interlace.train(name="mine", folder=tmp_path, resume=True, quiet=True, **given)  # type: ignore[arg-type]
    assert [row["step"] for row in read_rows(found.folder / "metrics.jsonl")] == [1, 2, 3]


def test_a_loaded_model_and_a_recipe_by_name(tmp_path: Path) -> None:
    model, tokenizer = build_tiny("micro", 0)
    changes = [
        "task.reasoning_gym.train_size=8", "task.reasoning_gym.heldout_size=0", "minibatches=1",
        "algorithm.drop_zero_variance=false", "algorithm.refill_rounds=0",
    ]  # fmt: skip
    found = interlace.train(
        "quickstart", model=(model, tokenizer), warmup=None, overrides=changes, folder=tmp_path, quiet=True, **TINY,
    )  # fmt: skip
    assert found.name == "quickstart" and found.recipe.steps == 2
    assert found.recipe.model.path.startswith(str(tmp_path / "data" / "model-"))
    with pytest.raises(UserError, match="without a tokenizer"):
        interlace.train("quickstart", model=model, folder=tmp_path)


def test_another_chat_template_of_the_same_model_is_another_folder(tmp_path: Path) -> None:
    model, tokenizer = build_tiny("micro", 0)
    folders = []
    for word in ("first", "second", "second"):
        tokenizer.chat_template = f"{{% for each in messages %}}{word} {{{{ each.content }}}}{{% endfor %}}"
        folders.append(save_model_object(model, tokenizer, tmp_path))
        assert word in AutoTokenizer.from_pretrained(folders[-1]).chat_template
    assert folders[1] == folders[2]
    assert {str(path) for path in (tmp_path / "data").iterdir()} == {*folders}, "nothing is left over"


def test_the_package_imports_no_torch() -> None:
    code = "import interlace, sys; assert 'train' in dir(interlace); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
