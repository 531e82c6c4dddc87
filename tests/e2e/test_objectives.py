"""Whole runs that train on given rows, and distillation, at toy size through the door of the command line."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import interlace
from interlace.core.errors import UserError
from interlace.core.types import Sample
from interlace.models.tiny import build_tiny
from interlace.observe.progress import PlainProgress
from interlace.observe.quiet import QuietWatch
from interlace.observe.report.page import write_report
from interlace.observe.report.panels import build_panels
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.offline_encoder import encode_rows
from interlace.run.recipe.prompts import recipe_prompts
from interlace.run.restore_test import restore_checkpoints
from tests.support.tokenizers import lower_casing_tokenizer, merging_tokenizer
from tests.support.training import equal_weights, final_weights, metrics, run_recipe, shared_cache

SMALL = (
    "steps=6",
    "prompts_per_step=8",
    "task.reasoning_gym.train_size=32",
    "task.reasoning_gym.heldout_size=8",
    "logging.loggers=[]",
    "cluster.devices=cpu:2",
    "eval_every=0",
)
SHORT_WARMUP = ("warmup.steps=5", "warmup.batch_size=8")


def small(*overrides: str) -> list[str]:
    return [*SMALL, shared_cache(), *overrides]


def heldout(root: Path, name: str, metric: str) -> list[float]:
    return RunData.read(RunFolder(path=root / name)).values(f"eval/{metric}")


def test_sft_lowers_the_loss_of_heldout_rows_and_resumes_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = small("checkpoint_every=2", "minibatches=2")
    run_recipe("sft", tmp_path, "whole", settings)
    before, after = heldout(tmp_path, "whole", "loss")
    assert after < before
    stopped = run_recipe("sft", tmp_path, "halves", settings, stop_after=3)
    assert stopped.done_steps == 3
    capsys.readouterr()
    run_recipe("sft", tmp_path, "halves", settings, resume=True, progress=PlainProgress(Console(), 6))
    shown = capsys.readouterr().out
    assert "resuming after step 3" in shown and "lost samples" not in shown, "steps on given rows write no samples"
    assert equal_weights(final_weights(tmp_path, "whole"), final_weights(tmp_path, "halves"))
    assert metrics(tmp_path, "whole")[3:] == metrics(tmp_path, "halves")[3:]


def test_a_silence_is_attributed_to_the_current_step_or_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(QuietWatch, "heard", lambda self, title: titles.append(title))
    run_recipe("sft", tmp_path, "run", small("steps=1"))
    assert titles == ["evaluation before", "step 1", "step 2", "evaluation after", "step 2"]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "kto", "orpo", "simpo"])
def test_dpo_lowers_the_loss_of_heldout_pairs(tmp_path: Path, loss: str) -> None:
    beta = {"simpo": "2", "ipo": "0.5"}.get(loss, "0.1")
    changes = (*SHORT_WARMUP, f"algorithm.loss={loss}", f"algorithm.beta={beta}", "optimizer.warmup_steps=0")
    run_recipe("dpo", tmp_path, "pairs", small(*changes))
    before, after = heldout(tmp_path, "pairs", "loss")
    assert after < before


def test_dpo_of_an_adapter_takes_its_base_as_the_reference(tmp_path: Path) -> None:
    changes = (*SHORT_WARMUP, "actor.lora.rank=4", "optimizer.lr=1e-2", "optimizer.warmup_steps=0")
    run_recipe("dpo", tmp_path, "lora", small(*changes))
    before, after = heldout(tmp_path, "lora", "loss")
    assert after < before


def test_the_folder_of_a_reward_model_is_the_reward_of_another_run(tmp_path: Path) -> None:
    run_recipe("reward-model", tmp_path, "scores", small(*SHORT_WARMUP, "checkpoint_every=3"), stop_after=3)
    run_recipe("reward-model", tmp_path, "scores", small(*SHORT_WARMUP, "checkpoint_every=3"), resume=True)
    before, *_, after = heldout(tmp_path, "scores", "loss")
    assert after < before
    folder = tmp_path / "scores" / "checkpoints" / "step_6"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    run = RunFolder(path=tmp_path / "scores")
    restored = list(restore_checkpoints(run, load_recipe(str(run.config))))
    assert any("step_6: reward model of" in part.what for part in restored) and not any(
        part.damage for part in restored
    )
    judged = ["reward.name=model", f"reward.model={folder}", "reward.tag=null", "reward.answer_format=text"]
    steps = ["steps=1", "prompts_per_step=4", "samples_per_prompt=2", "warmup=null", *judged]
    run_recipe("quickstart", tmp_path, "judged", small(*steps))
    assert "reward/model" in metrics(tmp_path, "judged")[0]


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("teacher")
    run_recipe("sft", root, "teacher", small("steps=30", "optimizer.warmup_steps=0"))
    return root / "teacher" / "checkpoints" / "step_30"


@pytest.mark.parametrize("signal", ["advantage", "loss", "top_k"])
@pytest.mark.parametrize("teacher", ["models", "context"])
def test_a_student_approaches_its_teacher(tmp_path: Path, trained_model: Path, teacher: str, signal: str) -> None:
    several = [] if signal == "top_k" else [f"reference.ensemble=[{trained_model}]"]
    teachers = {
        "models": [f"reference.model={trained_model}", *several],
        "context": ["reference.model=null", "reference.context='{answer}'"],
    }
    changes = [*teachers[teacher], "steps=8", "warmup=null", f"algorithm.signal={signal}", "sampling.max_new_tokens=8"]
    sizes = ["optimizer.lr=3e-3", "optimizer.warmup_steps=0", "reward=null", "schedule=one-step-off"]
    run_recipe("distill", tmp_path, "student", small(*changes, *sizes))
    found = [line["actor/teacher_kl"] for line in metrics(tmp_path, "student")]
    if teacher == "models":
        assert sum(found[-2:]) < sum(found[:2])
    assert found[0] != 0
    if signal == "top_k":
        forward = [line["actor/teacher_forward_kl"] for line in metrics(tmp_path, "student")]
        assert forward[0] > 0 and sum(forward[-2:]) < sum(forward[:2])


@pytest.mark.parametrize("name", ["dpo", "reward-model", "distill"])
def test_each_objective_resumes_exactly_and_has_a_ledger_and_a_report(tmp_path: Path, name: str) -> None:
    settings = small("steps=4", "checkpoint_every=2", "warmup=null", "cluster.threads_per_worker=1")
    if name == "distill":  # the teacher is the policy that reads the answer
        settings += ["reference.model=null", "reference.context='{answer}'", "reward=null", "sampling.max_new_tokens=8"]
    run_recipe(name, tmp_path, "whole", settings)
    assert run_recipe(name, tmp_path, "halves", settings, stop_after=2).done_steps == 2
    run_recipe(name, tmp_path, "halves", settings, resume=True)
    assert equal_weights(final_weights(tmp_path, "whole"), final_weights(tmp_path, "halves"))
    expected = [pytest.approx(row, rel=1e-5) for row in metrics(tmp_path, "whole")[2:]]
    assert metrics(tmp_path, "halves")[2:] == expected, "sums of metrics may round differently"
    rows = RunData.read(RunFolder(path=tmp_path / "halves")).rows
    assert len(rows) == 4 and all(row["goodput/train"] > 0 for row in rows)
    shown = {panel.title for panel in build_panels([RunData.read(RunFolder(path=tmp_path / "halves"))]).shown}
    titles = {"distill": {"Distance to the teacher"}}.get(name, {"Held-out loss", "Right tokens and pairs", "Margin"})
    assert titles <= shown
    write_report([RunFolder(path=tmp_path / "halves")], tmp_path / "report.html")
    assert all(title in (tmp_path / "report.html").read_text() for title in titles)


def save_teacher(folder: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_student_approaches_a_teacher_with_another_tokenizer(tmp_path: Path) -> None:
    other = save_teacher(tmp_path / "other", merging_tokenizer())
    run_recipe("sft", tmp_path, "teacher", small(f"model={other}", "steps=30", "optimizer.warmup_steps=0"))
    folder = tmp_path / "teacher" / "checkpoints" / "step_30"
    signal = "algorithm.signal=advantage"  # the teacher's most probable tokens are of another vocabulary
    changes = [f"reference.model={folder}", "reference.align=text", signal, "steps=30", "warmup=null", "reward=null"]
    sizes = ["sampling.max_new_tokens=8", "optimizer.lr=3e-3", "optimizer.warmup_steps=0", "schedule=one-step-off"]
    run_recipe("distill", tmp_path, "student", small(*changes, *sizes))
    found = [line["actor/teacher_kl"] for line in metrics(tmp_path, "student")]
    assert sum(found[-5:]) < sum(found[:5])


def test_a_teacher_without_a_common_text_is_refused(tmp_path: Path) -> None:
    def refusal(*changes: str) -> str:
        with pytest.raises(UserError) as caught:
            settings = ["warmup=null", "reward=null", "algorithm.signal=advantage", *changes]
            check_recipe(load_recipe("distill", small(*settings)))
        return str(caught.value)

    lossy = f"reference.model={save_teacher(tmp_path / 'lossy', lower_casing_tokenizer())}"
    assert "set reference.align=text, which aligns tokens by their text" in refusal(lossy)
    assert "does not restore the text of the task" in refusal(lossy, "reference.align=text")
    assert "remove reference.ensemble" in refusal(lossy, "reference.align=text", "reference.ensemble=[tiny:micro]")
    alone = ["reference.model=null", "reference.align=text", "reference.context='{answer}'"]
    assert "remove reference.context" in refusal(*alone)
    wrong = ["reference.align=text", "algorithm=grpo", "reward=reasoning_gym", "samples_per_prompt=2"]
    assert "reference.align=text is of a teacher" in refusal(lossy, *wrong)


def rows(tmp_path: Path, *lines: dict[str, object]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_conversations_are_imitated_in_the_words_of_the_assistant(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    longer = [*chat, {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
    path = rows(tmp_path, {"messages": chat}, {"messages": longer}, {"prompt": chat[:1], "completion": "5"})
    changes = [
        f"task={path}",
        "model=tiny:micro-chat",
        "steps=1",
        "prompts_per_step=3",
        "logging.loggers=[]",
        "eval_every=0",
    ]
    run_recipe("sft", tmp_path, "chats", changes)
    # Each answer is one letter, the end of the turn; what users say between answers is not trained.
    assert metrics(tmp_path, "chats")[0]["response_length/min"] >= 2


@pytest.mark.parametrize(
    ("recipe", "row", "message"),
    [
        ("sft", {"prompt": "1", "chosen": "2", "rejected": "3"}, "it is a row for dpo"),
        ("dpo", {"prompt": "1", "completion": "2"}, "it is a row for sft"),
        ("sft", {"prompt": "1", "completion": None}, "column 'completion' is null"),
        ("dpo", {"prompt": "1", "chosen": "2", "rejected": "2"}, "are equal"),
        ("sft", {"prompt": "1", "answer": "2"}, "has no column `completion`"),
        ("sft", {"messages": [{"role": "user", "content": "1"}]}, "the chat ends with a message of the user"),
        (
            "sft",
            {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "weight": 0}]},
            "have the weight 0, and all messages of the assistant",
        ),
        ("sft", {"chosen": "1 2", "rejected": "1 3"}, "it is a row for dpo"),
        ("reward-model", {"prompt": "1", "chosen": "2"}, "has no column `rejected`"),
        ("reward-model", {"prompt": "1", "chosen": "2", "rejected": "3", "margin": "x"}, "a margin is a number"),
    ],
)
def test_rows_of_another_kind_are_refused_with_the_recipe_to_use(
    tmp_path: Path, recipe: str, row: dict[str, object], message: str
) -> None:
    changes = [f"task={rows(tmp_path, row)}"]
    with pytest.raises(UserError, match=message):
        check_recipe(load_recipe(recipe, changes))


def test_a_call_of_an_arrow_table_has_its_own_arguments_alone(tmp_path: Path) -> None:
    """Arrow gives each call the arguments of all calls of the column, as nulls, which a model would learn to write."""
    datasets = pytest.importorskip("datasets")

    def chat(name: str, **arguments: str) -> list[dict[str, object]]:
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]

    rows = [{"messages": chat("weather", city="Rome")}, {"messages": chat("search", query="Rome")}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "calls.parquet")
    loaded = load_recipe("sft", [f"task={tmp_path / 'calls.parquet'}", "model=tiny:micro-chat"])
    tokenizer = build_tiny("micro-chat", 0)[1]
    texts = [tokenizer.decode(sample.token_ids) for sample in encode_rows(loaded, recipe_prompts(loaded).train)]
    assert '"arguments": {"city": "Rome"}' in texts[0] and '"arguments": {"query": "Rome"}' in texts[1]


@pytest.mark.parametrize("form", ["list", "text", "other column", "left out"])
def test_completions_are_written_with_the_tools_of_their_prompt(tmp_path: Path, form: str) -> None:
    model, tokenizer = build_tiny("micro-chat", 0)
    user = "{%- if message.role == 'user' and tools %}{{ tools | length }} tools: {% endif %}"
    tokenizer.chat_template = str(tokenizer.chat_template).replace("{%- for call in", f"{user}{{%- for call in")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    chat = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    name = "functions" if form == "other column" else "tools"
    path = rows(tmp_path, {"messages": chat, name: json.dumps(tools) if form == "text" else tools})
    column = {"other column": "task.columns.tools=functions", "left out": "task.columns.tools=null"}.get(form)
    changes = [f"task={path}", f"model={tmp_path / 'model'}", *([column] if column else [])]
    loaded = load_recipe("sft", changes)
    [sample] = encode_rows(loaded, recipe_prompts(loaded).train)
    whole = tokenizer.decode([*sample.prompt.token_ids, *sample.token_ids])
    assert whole.count("1 tools: ") == (0 if form == "left out" else 2)


@pytest.mark.parametrize("recipe", ["dpo", "reward-model"])
def test_pairs_of_whole_conversations_are_those_of_a_prompt(tmp_path: Path, recipe: str) -> None:
    """TRL's implicit prompt. Texts have no chat template in TRL, and one is refused here."""

    def encode(model: str, row: dict[str, object], *changes: str) -> Sample:
        loaded = load_recipe(recipe, [f"task={rows(tmp_path, row)}", f"model={model}", *changes])
        check_recipe(loaded)
        [sample] = encode_rows(loaded, recipe_prompts(loaded).train)
        return sample

    def tokens(sample: Sample) -> list[list[int]]:
        return [sample.prompt.token_ids.tolist(), *(segment.token_ids.tolist() for segment in sample.segments)]

    user, good, bad = (
        {"role": role, "content": each} for role, each in zip(("user", "assistant", "assistant"), "123", strict=True)
    )
    prompt, chats = {"prompt": [user]}, {"chosen": [user, good], "rejected": [user, bad]}
    apart = encode("tiny:micro-chat", {**prompt, "chosen": [good], "rejected": [bad]})
    assert tokens(encode("tiny:micro-chat", chats)) == tokens(apart)
    texts = {"chosen": "1+1= 2", "rejected": "1+1= 3"}
    parts = encode("tiny:micro", {"prompt": "1+1=", "chosen": " 2", "rejected": " 3"})
    assert tokens(encode("tiny:micro", texts)) == tokens(parts)
    with pytest.raises(UserError, match=r"rows.jsonl:1: .*Set task.format.chat_template=false"):
        encode("tiny:micro-chat", texts)
    encode("tiny:micro-chat", texts, "task.format.chat_template=false")
    sizes = {"steps": 1, "prompts_per_step": 1, "cluster": {"devices": "cpu:2"}, "logging": {"loggers": []}}
    run = interlace.train(recipe, data=[chats], model="tiny:micro-chat", folder=tmp_path, quiet=True, **sizes)  # type: ignore[arg-type]
    assert len(run.metrics) == 1


@pytest.mark.parametrize("recipe", ["sft", "dpo", "reward-model"])
def test_own_rows_need_no_other_setting(tmp_path: Path, recipe: str) -> None:
    """They replace the recipe's task, prompt format and warm-up, on the command line and in a program."""
    own = [{"prompt": f"1+{number}=", "completion": "2"} for number in range(4)]
    if recipe != "sft":
        own = [{"prompt": f"1+{number}=", "chosen": "2", "rejected": "3"} for number in range(4)]
    task = f"task={rows(tmp_path, *own)}"
    recipes = [load_recipe(recipe, [task]), load_recipe(recipe, [task, "task.files.heldout_size=2", "warmup.steps=7"])]
    assert recipes[0].warmup is None and recipes[0].eval_every == 0
    assert recipes[1].warmup is not None and recipes[1].warmup.steps == 7 and recipes[1].eval_every > 0
    assert load_recipe(recipe, ["task=chain_sum"]).eval_every > 0, "its dataset holds out rows by default"
    check_recipe(recipes[0])
    assert load_recipe(recipe, ["steps=1"]).eval_every > 0, "rows that are not replaced keep their settings"
    sizes = {"steps": 1, "prompts_per_step": 2, "cluster": {"devices": "cpu:2"}, "logging": {"loggers": []}}
    run = interlace.train(recipe, data=own, name="own", folder=tmp_path, quiet=True, **sizes)  # type: ignore[arg-type]
    assert len(run.metrics) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["reference.model=null"], "has no teacher"),
        (["reference.model=null", "reference.context='{source_index_that_is_absent}'"], "has no column"),
        (["reference.model=tiny:micro-chat"], "another vocabulary"),
        (["algorithm=grpo", "samples_per_prompt=4", "reference.context=x"], "reference.context is of a teacher"),
        (["algorithm.kl_coefficient=0.1"], "set teacher_coefficient instead"),
    ],
)
def test_a_teacher_that_has_no_effect_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_recipe(load_recipe("distill", changes))


def test_a_teacher_with_the_weights_of_the_student_is_refused(tmp_path: Path) -> None:
    """A copy of the student's folder taught nothing: the KL was 0 in every step, without a message."""
    model, tokenizer = build_tiny("micro", 0)
    for name in ("student", "copy", "other"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        if name == "copy":
            model.get_output_embeddings().weight.data.add_(0.01)
    settings = ["warmup=null", f"model={tmp_path / 'student'}"]
    with pytest.raises(UserError, match="has no teacher"):
        check_recipe(load_recipe("distill", [*settings, f"reference.model={tmp_path / 'copy'}"]))
    check_recipe(load_recipe("distill", [*settings, f"reference.model={tmp_path / 'other'}"]))
