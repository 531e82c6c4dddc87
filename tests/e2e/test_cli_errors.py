"""Invalid input on the command line gives a clear message and exit code 2, and leaves no files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import interlace
from interlace.cli.main import app
from interlace.core.errors import UserError
from interlace.models.tiny import build_tokenizer
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_lock import RunLock

RECIPE = """
model: tiny:micro
task:
  reasoning_gym:
    name: number_sorting
    parameters: {min_numbers: 3, max_numbers: 5, min_decimals: 0, max_decimals: 0, min_value: 0, max_value: 9}
    train_size: 12
    heldout_size: 2
  format: {template: "{original_numbers}{direction}", replace: {".0": "", ascending: "<", descending: ">"}}
reward: {name: reasoning_gym, tag: answer, answer_format: characters, workers: 0}
cluster: {devices: "cpu:2"}
steps: 2
prompts_per_step: 2
samples_per_prompt: 2
sampling: {max_new_tokens: 4}
evaluation: {samples_per_prompt: 0}
rollout: {max_running: 8, max_tokens: 256}
logging: {loggers: []}
"""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
Train = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe `mine.yaml` in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def train(folder: Path) -> Train:
    return lambda *args: CliRunner().invoke(app, ["train", *args])


def refused(result: Result, *sentences: str) -> None:
    assert result.exit_code == 2, result.output
    for sentence in sentences:
        assert sentence in result.stderr
    assert "Traceback" not in result.output


def no_run(folder: Path) -> bool:
    return not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("args", "sentences"),
    [
        (["quickstrat"], ["unknown recipe 'quickstrat'. Did you mean 'quickstart'?"]),
        (["none.yaml"], ["recipe 'none.yaml': there is no such file"]),
        (["mine.yaml", "promts_per_step=2"], ["unknown key 'promts_per_step'. Did you mean 'prompts_per_step'?"]),
        (
            ["mine.yaml", "sampling.max_tokens=2"],
            ["unknown key 'sampling.max_tokens'. vLLM: write sampling.max_new_tokens"],
        ),
        (["mine.yaml", "steps=many"], ["steps = 'many'", "a whole number"]),
        (["mine.yaml", "steps"], ["cannot read the override 'steps'", "key=value"]),
        (["mine.yaml", "samples_per_prompt=1"], ["samples_per_prompt=1", "'grpo'", "Set samples_per_prompt to 2"]),
        (["mine.yaml", "minibatches=4"], ["prompts_per_step=2 cannot be cut into minibatches=4"]),
        (["mine.yaml", "schedule=one-step-of"], ["unknown schedule 'one-step-of'. Did you mean 'one-step-off'?"]),
        (["mine.yaml", "schedule.max_stalenes=1"], ["unknown key 'max_stalenes'. Did you mean 'max_staleness'?"]),
        (["mine.yaml", "schedule.placement.actor=2"], ["placement.actor = '2' names device 2, but the pool has 2"]),
        (["mine.yaml", "algorithm=grpoo"], ["unknown algorithm 'grpoo'. Did you mean 'grpo'?"]),
        (["mine.yaml", "cluster=sim"], ["cluster.backend = 'sim': there is no such back end", "local"]),
        (["mine.yaml", "task=rows.csv", "reward=exact"], ["data file 'rows.csv' does not exist"]),
        (["mine.yaml", "model=./nowhere"], ["model './nowhere': there is no such folder or file"]),
        (["mine.yaml", "--name", "a/b"], ["run name 'a/b' cannot name a folder"]),
        (["mine.yaml", "--name", ""], ["run name '' cannot name a folder"]),
        (["mine.yaml", "--resume"], ["there is no run of 'mine'", "Start it without --resume"]),
        (["mine.yaml", "--resume", "--name", "x"], ["there is no run 'x' to resume"]),
        (["mine.yaml", "--resume", "--overwrite"], ["give one of them"]),
    ],
)
def test_bad_input_is_refused(folder: Path, train: Train, args: Sequence[str], sentences: Sequence[str]) -> None:
    refused(train(*args), *sentences)
    assert no_run(folder)


@pytest.mark.parametrize(
    ("args", "sentences"),
    [
        (["simulate", "samples_per_prompt=1"], ["samples_per_prompt=1", "Set samples_per_prompt to 2"]),
        (["simulate", "minibatches=4"], ["prompts_per_step=2 cannot be cut into minibatches=4"]),
        (["simulate", "actor.ranks=3"], ["actor.ranks=3", "which cannot be shared out evenly"]),
        (["simulate", "schedule.max_staleness=.inf"], ["max_staleness = inf", "finite number"]),
        (["simulate", "--timeline", "no/t.json"], ["--timeline no/t.json: there is no folder no"]),
        (["simulate", "--timeline", "."], ["--timeline . is a folder"]),
        (["simulate", "--timeline", "/proc/t.json"], ["--timeline /proc/t.json"]),  # no file can be made there
        (["simulate", "--profile", "bytes.json"], ["profile 'bytes.json' (bytes.json) is not JSON"]),
        (["compare", "--cluster", "sim", "--schedules", "areal", "--steps", "0"], ["steps = 0: it must be 1 or more"]),
        (["compare", "--cluster", "sim", "--schedules", "areal", "minibatches=4"], ["cannot be cut into"]),
        (["compare", "--cluster", "local", "--schedules", "areal"], ["--profile are of a virtual cluster"]),
        (["profile", "--out", "."], ["--out . is a folder"]),
        (["profile", "--budget", "nan"], ["--budget nan: give the seconds"]),
        (["profile", "--budget", "-1"], ["--budget -1: give the seconds"]),
    ],
)
def test_so_is_bad_input_of_what_only_predicts_or_measures(
    folder: Path, args: Sequence[str], sentences: Sequence[str]
) -> None:
    (folder / "bytes.json").write_bytes(b"\x80")
    command, *rest = args
    costs = [] if command == "profile" or "--profile" in rest else ["--profile", "qwen2.5-7b-h20"]
    refused(CliRunner().invoke(app, [command, "mine.yaml", *rest, *costs]), *sentences)
    assert no_run(folder)


def test_a_report_needs_a_run_and_a_file(folder: Path) -> None:
    options = ("--schedules", "areal", "--cluster", "sim", "--profile", "qwen2.5-7b-h20")
    assert CliRunner().invoke(app, ["compare", "mine.yaml", *options]).exit_code == 0
    refused(CliRunner().invoke(app, ["report", "mine-areel"]), "'mine-areel' is not a run")
    refused(CliRunner().invoke(app, ["report", "mine-areal-simulated", "--out", "."]), "--out . is a folder")


def test_a_run_that_is_being_trained_is_neither_resumed_nor_replaced(folder: Path, train: Train) -> None:
    assert train("mine.yaml", "--quiet").exit_code == 0
    metrics = folder / "runs" / "mine" / "metrics.jsonl"
    before = metrics.read_text()
    with RunLock(RunFolder(path=metrics.parent)):
        for option in ("--resume", "--overwrite"):
            refused(train("mine.yaml", option, "--name", "mine", "steps=3"), "is being trained by process", "--name")
    assert metrics.read_text() == before


def test_a_model_that_is_no_causal_language_model_is_refused(folder: Path, train: Train) -> None:
    model = folder / "bert"
    build_tokenizer(64).save_pretrained(model)
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 300, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps(config))
    refused(train("mine.yaml", f"model={model}"), "is not a causal language model", "BertForMaskedLM")
    assert no_run(folder)


@pytest.mark.parametrize("token", ["pad_token", "eos_token"])
def test_a_tokenizer_that_lacks_a_token_is_refused(folder: Path, train: Train, token: str) -> None:
    tokenizer = build_tokenizer(64)
    setattr(tokenizer, token, None)
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    refused(train("mine.yaml", f"model={folder / 'model'}"), f"has no {token}", f"set model.{token}")
    assert no_run(folder)


def test_a_model_whose_configuration_contradicts_itself_is_refused(folder: Path, train: Train) -> None:
    build_tokenizer(64).save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({**LLAMA, "num_attention_heads": 3}))
    refused(train("mine.yaml", f"model={folder / 'model'}"), "hidden size (8) is not a multiple")
    assert no_run(folder)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", ["rows.jsonl' is empty"]),
        ('{"prompt": "1+1=", "answer": "2"}\nnot json\n', ["rows.jsonl:2: not JSON"]),
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2="}\n', ["rows.jsonl:2: there is no column 'answer'"]),
        ('{"question": "1+1=", "answer": "2"}\n', ["rows.jsonl:1: there is no column 'prompt'"]),
        ("[1]\n", ["rows.jsonl:1", "must be a JSON object"]),
    ],
)
def test_a_bad_data_file_is_named_with_its_line(
    folder: Path, train: Train, text: str, sentences: Sequence[str]
) -> None:
    (folder / "rows.jsonl").write_text(text)
    refused(train("mine.yaml", "task=rows.jsonl", "reward=exact"), *sentences)
    assert no_run(folder)


def test_a_run_whose_name_is_taken_is_refused_and_left_as_it_is(folder: Path, train: Train) -> None:
    config = folder / "runs" / "taken" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("steps: 1\n")
    refused(train("mine.yaml", "--name", "taken"), "run 'taken' exists already", "--resume", "--overwrite", "--name")
    assert [path.name for path in config.parent.iterdir()] == ["config.yaml"]
    assert config.read_text() == "steps: 1\n"


def test_a_run_trains_reports_and_resumes(folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    result = train("mine.yaml", "checkpoint_every=1", "keep_checkpoints=3")
    assert result.exit_code == 0, result.output
    for shown in ("samples a step", "step 2/2", "Held-out accuracy", "Sampled answers", "metrics.jsonl", "step_2"):
        assert shown in result.stdout
    run = folder / "runs" / "mine"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    refused(train("mine.yaml", "--resume", "steps=1"), "steps=1, but", "give 2 or more")
    refused(train("mine.yaml", "--resume", "seed=2"), "'seed=2' would make the resumed run another one", "steps")
    longer = train("mine.yaml", "--resume", "steps=3", "actor.ranks=1", "--quiet")
    assert longer.exit_code == 0, longer.output
    assert longer.stdout == ""
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert "steps: 3" in (run / "config.yaml").read_text()
    with monkeypatch.context() as without:
        without.setattr("interlace.run.recipe.check.check_recipe", None)  # which loads torch and the model's tokenizer
        again = train("mine.yaml", "--resume")
    assert again.exit_code == 0 and "has trained all 3 steps. To train more: --resume steps=NUMBER." in again.stdout
    evaluated = (run / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluated] == [0, 2, 3]
    judged = CliRunner().invoke(app, ["eval", "mine", "--quiet"])
    assert judged.exit_code == 0, judged.output
    assert "Held-out accuracy" in judged.stdout
    refused(CliRunner().invoke(app, ["eval", "tiny:micro"]), "is no run", "--recipe")


def test_a_resume_reads_the_recipe_again(folder: Path, train: Train) -> None:
    recipe, run = folder / "mine.yaml", folder / "runs" / "mine"
    assert train("mine.yaml", "checkpoint_every=1", "sampling.max_new_tokens=3", "--quiet").exit_code == 0
    recipe.write_text("# comment\n" + RECIPE)
    assert "has trained all 2 steps" in train("mine.yaml", "--resume").stdout
    recipe.write_text(RECIPE.replace("steps: 2", "steps: 3").replace("samples_per_prompt: 2", "samples_per_prompt: 4"))
    refused(
        train("mine.yaml", "--resume"), "mine.yaml was changed since run 'mine'", "samples_per_prompt: 2 -> 4 (not all",
        "steps: 2 -> 3 (allowed)", "runs/mine/config.yaml as the recipe",
    )  # fmt: skip
    refused(train("quickstart", "--name", "mine", "--resume"), "quickstart differs from mine.yaml", "more\nWith")
    with pytest.raises(UserError, match="With resume=True only"):
        interlace.train("mine.yaml", name="mine", resume=True, quiet=True)
    assert "has trained all 2 steps" in train("runs/mine/config.yaml", "--name", "mine", "--resume").stdout
    recipe.write_text(RECIPE.replace("steps: 2", "steps: 3"))
    longer = train("mine.yaml", "--resume")
    assert longer.exit_code == 0 and "steps: 2 -> 3 (allowed)" in longer.stdout, longer.output
    assert "max_new_tokens: 3" in (run / "config.yaml").read_text(), "a setting of the first command stays"
    recipe.write_text(RECIPE.replace("steps: 2", "steps: 4"))
    assert len(interlace.train("mine.yaml", name="mine", resume=True, quiet=True).rewards) == 4
    (run / "recipe.yaml").unlink()  # as of a run of an earlier version
    recipe.write_text(RECIPE)
    assert "has trained all 4 steps" in train("mine.yaml", "--resume").stdout


def test_rows_beside_a_recipe_of_another_folder_are_named(folder: Path, train: Train) -> None:
    (folder / "other").mkdir()
    text = RECIPE[: RECIPE.index("task:")] + "task: rows.jsonl\n" + RECIPE[RECIPE.index("reward:") :]
    (folder / "other" / "own.yaml").write_text(text)
    (folder / "other" / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for option in ((), ("--dry-run",)):
        refused(train("other/own.yaml", "reward=exact", *option), "beside the recipe. Set it to other/rows.jsonl.")
    with pytest.raises(UserError, match=r"other/rows\.jsonl"):
        interlace.train("other/own.yaml", reward="exact", quiet=True)


def test_a_second_run_gets_a_name_of_its_own(folder: Path, train: Train) -> None:
    (folder / "runs" / "mine").mkdir(parents=True)
    assert train("mine.yaml", "steps=1", "--quiet").exit_code == 0
    assert (folder / "runs" / "mine-2" / "metrics.jsonl").exists()


def test_a_mistake_that_only_the_workers_see_leaves_no_run(folder: Path, train: Train) -> None:
    (folder / "rewards.py").write_text("def score(prompt, response, answer, metadata):\n    return 1.0\n")
    model = folder / "model"
    build_tokenizer(64).save_pretrained(model)
    (model / "config.json").write_text(json.dumps(LLAMA))  # and no weights
    refused(train("mine.yaml", f"model={model}", "reward=rewards:score"), "cannot be loaded")
    assert list((folder / "runs").iterdir()) == []


def test_an_error_in_the_middle_says_how_to_go_on_where_that_is_possible(folder: Path, train: Train) -> None:
    (folder / "broken.py").write_text(
        "from pathlib import Path\nfrom interlace.algorithms.grpo import GRPO\n\n\nclass Broken(GRPO):\n"
        "    def loss(self, inputs):\n"
        "        steps = Path('runs/late/metrics.jsonl').read_text().splitlines()\n"
        "        if len(steps) < 2 and not Path('runs/early').exists():\n"
        "            return super().loss(inputs)\n"
        "        raise RuntimeError('lost')\n"
    )
    late = train("mine.yaml", "algorithm=broken:Broken", "checkpoint_every=1", "steps=9", "--name", "late")
    assert late.exit_code == 1
    assert "RuntimeError: lost" in late.stderr
    assert "actor" in late.stderr
    assert "interlace train runs/late/config.yaml --name late --resume" in late.stderr
    early = train("mine.yaml", "algorithm=broken:Broken", "--name", "early")
    assert early.exit_code == 1
    assert "--resume" not in early.stderr and "start it again with --overwrite" in early.stderr
    kept = [(folder / "runs" / "late" / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")]
    replacing = train("mine.yaml", "algorithm=broken:Broken", "--name", "late", "--overwrite", "seed=7")
    assert replacing.exit_code == 1 and "The earlier run 'late' stays as it was." in replacing.stderr
    assert [(folder / "runs" / "late" / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")] == kept


def test_a_full_disk_leaves_the_checkpoint_before_it(
    folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    real, checkpoints = shutil.disk_usage, folder / "runs" / "mine" / "checkpoints"

    def fills_up(path: Path) -> object:
        return real(path)._replace(free=10) if (checkpoints / "step_1").exists() else real(path)

    monkeypatch.setattr(shutil, "disk_usage", fills_up)
    refused(train("mine.yaml", "checkpoint_every=1"), "no space", "step_1 is whole", "--resume")
    assert [path.name for path in checkpoints.iterdir()] == ["step_1"]
    assert (checkpoints / "step_1" / "model.safetensors").exists()


def test_an_option_that_is_a_setting_says_how_settings_are_given(folder: Path, train: Train) -> None:
    for given in (["--steps", "3"], ["--steps=3"]):
        refused(train("mine.yaml", *given), "--steps is not an option", "steps=3")


def test_a_step_that_no_memory_holds_is_refused(folder: Path, train: Train) -> None:
    refused(train("mine.yaml", "prompts_per_step=1000000000"), "prompts_per_step=1000000000", "GiB", "take fewer")
    assert not (folder / "runs").exists()


def test_a_step_of_more_prompts_than_there_are_is_said(folder: Path, train: Train) -> None:
    result = train("mine.yaml", "prompts_per_step=16", "steps=1")
    assert result.exit_code == 0, result.output
    assert "prompts_per_step=16, and there are" in result.output


def test_a_recipe_s_path_of_any_letters_names_a_run(folder: Path, train: Train) -> None:
    (folder / "a b").mkdir()
    (folder / "a b" / "é ü.yaml").write_text((folder / "mine.yaml").read_text())
    assert train("a b/é ü.yaml", "steps=1", "--quiet").exit_code == 0
    assert [path.name for path in (folder / "runs").iterdir()] == ["e-u"]
    assert train("a b/é ü.yaml", "steps=2", "--resume", "--quiet").exit_code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("name", ["metrics.jsonl", "timeline.json", "step_000001.jsonl.*.tmp", "evaluations.jsonl"])
def test_a_disk_that_is_full_is_said_whatever_was_written(
    folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    open_real = Path.open

    def open_full(path: Path, *args: Any, **kwargs: Any) -> Any:
        return open_real(Path("/dev/full") if path.match(name) else path, *args, **kwargs)

    with monkeypatch.context() as full:
        full.setattr(Path, "open", open_full)
        refused(train("mine.yaml"), "the disk of runs/mine is full", "Make room", "--overwrite")
    assert train("mine.yaml", "--overwrite", "--name", "mine", "--quiet").exit_code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_disk_that_is_too_full_for_a_report_is_said(
    folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("mine.yaml", "--quiet").exit_code == 0
    open_real = Path.open

    def open_full(path: Path, *args: Any, **kwargs: Any) -> Any:
        return open_real(Path("/dev/full") if path.match("report.html.*.tmp") else path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_full)
    refused(CliRunner().invoke(app, ["report", "mine"]), "the disk is full", "Free some space")
