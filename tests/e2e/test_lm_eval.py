"""Tasks of lm-evaluation-harness give the numbers of its transformers model, by a folder, a run and a server."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import interlace
from interlace.cli.lm_eval import KEY_ENV
from interlace.cli.main import app
from interlace.core.errors import UserError
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from tests.support.training import run_recipe

lm_eval = pytest.importorskip("lm_eval")
TASKS = {
    "tiny_gen": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": 0,
        "doc_to_choice": ["{{answer}}", "9", "nothing"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "tiny_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{answer}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    },
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with one task of each kind of request, on rows of this machine."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, "test_split": "test", **data, **task}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    loaded = load_model(ModelConfig(path="tiny:micro"))
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def measure(model: object, tasks: Path, **options: object) -> "dict[str, Any]":
    """Returns the responses or log-likelihoods of each task."""
    found = lm_eval.simple_evaluate(
        model=model, tasks=[*TASKS], task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
        bootstrap_iters=0, **options,
    )  # fmt: skip
    return {name: [sample["resps"] for sample in found["samples"][name]] for name in TASKS}


def check_equal(ours: "dict[str, Any]", theirs: "dict[str, Any]") -> None:
    assert ours["tiny_gen"] == theirs["tiny_gen"]
    for mine, other in zip(ours["tiny_choice"], theirs["tiny_choice"], strict=True):
        for [(value, is_greedy)], [(expected, expected_greedy)] in zip(mine, other, strict=True):
            assert value == pytest.approx(expected, abs=1e-3) and is_greedy == expected_greedy
    for mine, other in zip(ours["tiny_rolling"], theirs["tiny_rolling"], strict=True):
        assert mine[0][0] == pytest.approx(other[0][0], abs=1e-2)


def test_a_folder_a_server_and_transformers_agree(model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = measure("hf", tasks, model_args={"pretrained": str(model), "device": "cpu"})
    own = interlace.lm_eval_model(model)
    check_equal(measure(own, tasks), expected)
    own.close()
    with interlace.serve(model, ["cluster.devices=cpu:1"], port=0) as server:
        monkeypatch.setenv(KEY_ENV, server.admin_key)
        served = interlace.lm_eval_model(server.url)
        check_equal(measure(served, tasks), expected)
        served.close()


def test_the_command_evaluates_a_checkpoint_of_a_run(tasks: Path, tmp_path: Path) -> None:
    small = ["steps=1", "prompts_per_step=4", "task.reasoning_gym.train_size=16", "task.reasoning_gym.heldout_size=4"]
    cache = f"model.cache_dir={tmp_path / 'cache'}"
    run_recipe("sft", tmp_path, "mine", [*small, "logging.loggers=[]", "cluster.devices=cpu:2", cache])
    arguments = [
        "lm-eval",
        str(tmp_path / "mine"),
        "--checkpoint",
        "1",
        "--tasks",
        "tiny_gen,tiny_choice",
        "--limit",
        "2",
    ]
    result = CliRunner().invoke(app, [*arguments, "--include_path", str(tasks), "--output_path", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    [written] = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(written.read_text())
    assert set(found["results"]) == {"tiny_gen", "tiny_choice"} and found["n-samples"]["tiny_gen"]["effective"] == 2
    assert found["config"]["model"] == "interlace"


def test_a_task_without_a_temperature_is_answered_greedily() -> None:
    """Answers to tasks that name only stop texts, such as coqa and drop, were sampled at temperature 1."""
    from interlace.run.lm_eval import _sampling_params

    assert _sampling_params({"until": ["."]}, ()).temperature == 0
    assert _sampling_params({"until": ["."], "do_sample": True, "temperature": 0.7}, ()).temperature == 0.7


def test_mistakes(tmp_path: Path) -> None:
    def refusal(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["lm-eval", *arguments])
        assert result.exit_code == 2, result.output
        return str(result.stderr)

    assert "name tasks of lm-evaluation-harness" in refusal("tiny:micro")
    assert "--model_args is set by this command" in refusal("tiny:micro", "--tasks", "x", "--model_args", "a=b")
    assert "'tiny:micro' is not a run" in refusal("tiny:micro", "--checkpoint", "best", "--tasks", "x")
    assert "--tokenizer is for a server" in refusal("tiny:micro", "--tokenizer", "x", "--tasks", "x")
    assert "belong to the command of the server" in refusal("http://127.0.0.1:9", "seed=1", "--tasks", "x")
    with pytest.raises(UserError, match="num_beams: the engine has no such argument"):
        from interlace.run.lm_eval import _sampling_params

        _sampling_params({"until": ["\n"], "num_beams": 4}, ())
