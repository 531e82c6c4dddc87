"""The warmed-up model is made once and completely, even if several processes make it at the same time."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from interlace.models.tiny import build_tiny
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train
from interlace.run.warmup import find_warmup, warmup_folder
from tests.support.robots import DOT
from tests.support.training import SMALL


def test_runs_that_are_started_together_do_not_touch_each_others_warm_up(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "warmup"
    recipe = load_recipe("quickstart", [*SMALL, "steps=1", "warmup.steps=2", f"model.cache_dir={cache.parent}"])

    def start(name: str, progress: QuietProgress) -> None:
        folder = RunFolder.create(tmp_path, name)
        assert train(recipe, folder, resume=False, progress=progress, stop=StopSignal(lambda: None)).done_steps == 1

    class Overtaken(QuietProgress):
        """After whose first step another run does all of its warm-up."""

        def stage(self, name: str, done: int, total: int, note: str = "") -> None:
            super().stage(name, done, total, note)
            if (name, done) == ("warm-up", 1):
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(start, "faster", QuietProgress()).result()

    start("slower", Overtaken())
    [made] = cache.iterdir()
    assert (made / "model.safetensors").exists() and not made.name.startswith(".")


def test_ctrl_c_does_not_wait_for_the_end_of_a_warm_up(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    recipe = load_recipe("quickstart", [*SMALL, "steps=1", "warmup.steps=100000", f"model.cache_dir={cache}"])

    class Impatient(QuietProgress):
        """Presses Ctrl-C after its first step."""

        def stage(self, name: str, done: int, total: int, note: str = "") -> None:
            super().stage(name, done, total, note)
            if (name, done) == ("warm-up", 1):
                os.kill(os.getpid(), signal.SIGINT)

    with StopSignal(lambda: None) as stop, pytest.raises(KeyboardInterrupt):
        train(recipe, RunFolder.create(tmp_path, "run"), resume=False, progress=Impatient(), stop=stop)
    assert list((cache / "warmup").iterdir()) == [], "nothing half made is left"


def test_an_edited_data_file_and_a_replaced_model_have_a_warm_up_of_their_own(tmp_path: Path) -> None:
    rows, model_folder = tmp_path / "rows.jsonl", tmp_path / "model"

    def write_rows(shift: int) -> None:
        pairs = [{"prompt": f"{n}+1=", "answer": str(n + shift)} for n in range(8)]
        rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def write_model(seed: int) -> None:
        for part in build_tiny("micro", seed):
            part.save_pretrained(model_folder)

    write_rows(1)
    write_model(0)
    settings = [f"model.path={model_folder}", f"model.cache_dir={tmp_path}", f"task={rows}", "reward=exact", "steps=1"]
    settings += ["warmup.steps=1", "warmup.demonstrations={style: answer}", "cluster.devices=cpu:2"]
    recipe = load_recipe("quickstart", [*settings, "prompts_per_step=2", "logging.loggers=[]"])
    run = RunFolder.create(tmp_path, "run")
    train(recipe, run, resume=False, progress=QuietProgress(), stop=StopSignal(lambda: None))
    first = warmup_folder(recipe)
    assert first.is_dir()
    write_rows(1)
    write_model(0)
    assert warmup_folder(recipe) == first, "the same content in new files"
    write_model(7)
    other_model = warmup_folder(recipe)
    write_rows(5)
    other_rows = warmup_folder(recipe)
    assert len({first, other_model, other_rows}) == 3
    assert find_warmup(run, recipe) == first, "the run records the warm-up that it started from"


def test_an_edited_writer_of_examples_has_a_warm_up_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "own_examples.py"
    file.write_text("from interlace.data.demonstrations.answer import Demonstrator\n\n\nclass Own(Demonstrator): ...\n")
    recipe = load_recipe("quickstart", ["warmup.demonstrations.style=own_examples:Own"])
    first = warmup_folder(recipe)
    file.write_text(file.read_text() + "# edited\n")
    assert warmup_folder(recipe) != first


def test_an_edited_simulator_has_a_warm_up_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scripted expert records the examples."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "own_simulator.py"
    file.write_text("from tests.support.dot_simulator import Dot\n\n\nclass Own(Dot): ...\n")
    recipe = load_recipe("robot-cartpole", [*DOT, "episode.env.family=own_simulator:Own"])
    first = warmup_folder(recipe)
    file.write_text(file.read_text() + "# edited\n")
    assert warmup_folder(recipe) != first


@pytest.mark.parametrize(
    ("recipe", "package"), [("quickstart", "reasoning_gym"), ("quickstart", "torch"), ("robot-cartpole", "gymnasium")]
)
def test_another_version_of_a_package_has_a_warm_up_of_its_own(
    recipe: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may generate other questions or record other examples."""
    first = warmup_folder(load_recipe(recipe))
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == package else installed(name))
    assert warmup_folder(load_recipe(recipe)) != first


def test_a_warm_up_for_an_engine_that_draws_other_ids_is_another_one() -> None:
    folders = {warmup_folder(load_recipe("quickstart", [f"rollout={engine}"])) for engine in ("native", "vllm")}
    assert len(folders) == 2


def test_reward_and_algorithm_of_a_source_do_not_change_the_warm_up(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n", encoding="utf-8")

    def folder_with(reward: str, algorithm: str = "null") -> Path:
        scorer = f"{{name: {reward}, correct: 1, incorrect: 0}}"
        source = f"{{source: {rows}, weight: 1, reward: {scorer}, algorithm: {algorithm}}}"
        words = ["warmup.steps=2", f"task=[{source}]", f"model.cache_dir={tmp_path}"]
        return warmup_folder(load_recipe("quickstart", words))

    assert folder_with("exact") == folder_with("math") == folder_with("exact", "maxrl")
