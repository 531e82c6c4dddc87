"""load_model refuses unusable models with a sentence, and loads GGUF files."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from interlace.core.errors import UserError
from interlace.models.config import ModelConfig
from interlace.models.loading import check_model, load_model
from interlace.models.stop_tokens import read_stop_tokens
from interlace.models.tiny import build_tiny, build_tokenizer
from interlace.observe.checkpoints import MANIFEST, write_manifest
from tests.support.gguf_tensors import list_gguf_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder, to be damaged."""
    model, tokenizer = build_tiny("micro", 0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def refusal(path: Path | str, *, only_load: bool = False, **settings: str) -> str:
    """The message; also of check_model, which runs before any work."""
    config = ModelConfig(path=str(path), **settings)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        load_model(config)
    if not only_load:
        with pytest.raises(UserError):
            check_model(config)
    return str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none", "./none", "~/none/such/model", tmp_path / "none.gguf", "none.gguf"):
        assert "there is no such folder or file" in refusal(path)
    assert "Did you mean 'smollm2'" in refusal("../smollm")


def test_a_checkpoint_that_does_not_exist(tmp_path: Path) -> None:
    """The teacher of the recipe distill is a checkpoint of another run."""
    path = tmp_path / "runs" / "sft" / "checkpoints" / "step_400"
    assert "has no such checkpoint. It has: none. Train it first" in refusal(path)
    (path.parent / "step_5").mkdir(parents=True)
    assert "has no such checkpoint. It has: step_5. Train it first" in refusal(path)


def test_an_id_that_the_hub_cannot_give() -> None:
    """Offline here, as in a cluster without network."""
    assert "model 'nobody/no-such-model' has no readable configuration" in refusal("nobody/no-such-model")


def test_an_id_of_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    told = refusal("nobody/no-such-model")
    assert "there is no such folder here, and http://127.0.0.1:9" in told and "cannot be reached" in told


def test_what_is_not_a_causal_language_model(folder: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertForMaskedLM(BertConfig(vocab_size=300, **sizes)).save_pretrained(folder)
    assert "is not a causal language model: its configuration says BertForMaskedLM" in refusal(folder)
    edit(folder / "config.json", architectures=["LlamaForSequenceClassification"], model_type="llama")
    assert "says LlamaForSequenceClassification" in refusal(folder)
    (folder / "config.json").unlink()
    assert "has no readable configuration: there is no config.json in it." in refusal(folder)


def test_a_path_beside_the_model(folder: Path) -> None:
    """Its folder is named: of a run, of a file in it; and what an adapter is."""
    run = folder.parent / "run"
    folder.rename(make(run / "checkpoints") / "step_1")
    assert f"Did you mean '{run}/checkpoints/step_1'?" in refusal(run)
    assert f"Give its folder, '{run}/checkpoints/step_1'" in refusal(run / "checkpoints/step_1/model.safetensors")
    (run / "adapter_config.json").write_text("{}")
    assert "it is an adapter alone" in refusal(run)


def test_a_configuration_that_lacks_what_its_own_keys_need(folder: Path) -> None:
    """As the first Phi-3 models with long contexts: the type is an old name, the original context stood elsewhere."""
    su = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    edit(folder / "config.json", model_type="phi3", architectures=["Phi3ForCausalLM"], **sizes, rope_scaling=su)
    message = refusal(folder)
    assert f"model '{folder}' has an incomplete configuration: Missing required keys" in message
    assert "'original_max_position_embeddings'" in message


def test_a_tokenizer_without_pad_or_end(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", pad_token=None)
    assert "has no pad_token: set model.pad_token to a token of its vocabulary" in refusal(folder)
    assert load_model(ModelConfig(path=str(folder), pad_token="<eos>")).tokenizer.pad_token == "<eos>"
    assert "model.pad_token = '[PAD]' is not in the tokenizer's vocabulary" in refusal(folder, pad_token="[PAD]")
    edit(folder / "tokenizer_config.json", eos_token=None)
    assert "has no eos_token" in refusal(folder, pad_token="<pad>")


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(folder.parent / name)
    said = refusal(folder)
    assert "has no readable tokenizer: it has no file of a tokenizer. Save the model's tokenizer in this folder" in said


def test_a_folder_whose_tokenizer_would_be_made_up(folder: Path) -> None:
    """transformers makes an empty one for some architectures, in which every text is <unk> or no token at all."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    for kind in ("gemma2", "qwen2"):
        edit(folder / "config.json", model_type=kind, architectures=[f"{kind.title()}ForCausalLM"])
        assert "has no readable tokenizer: its vocabulary is empty" in refusal(folder)


def test_another_models_tokenizer(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=100)
    assert "the tokenizer has 258 tokens" in refusal(folder)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=4)
    assert "lacks 9 weights (model.layers.3." in refusal(folder, only_load=True)


def test_weights_of_more_layers_than_the_configuration_says_are_not_left_out(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=2, layer_types=None)
    assert "has 9 weights of more layers than its config.json says, such as model.layers.2." in refusal(
        folder, only_load=True
    )


def test_biases_that_the_configuration_leaves_out_are_not_left_out(folder: Path) -> None:
    config = LlamaConfig.from_pretrained(folder, attention_bias=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    load_model(ModelConfig(path=str(folder)))
    edit(folder / "config.json", attention_bias=False)
    assert "has 12 weights for layers that have none by its config.json, such as model.layers.0.self_attn.k_proj" in (
        refusal(folder, only_load=True)
    )


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a"])
def test_weights_that_were_not_fetched(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert f"model '{folder}' cannot be loaded: Error while deserializing" in refusal(folder, only_load=True)


def test_a_changed_bit_in_a_copy_of_a_folder_with_checksums(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "rank-0-of-1.safetensors").write_bytes(b"moments")
    (folder / "state.json").write_text("{}")
    write_manifest(folder)
    copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("elsewhere") / "copy"))
    for beside in (copy / "optimizer" / "rank-0-of-1.safetensors", copy / "state.json"):
        beside.unlink()
    load_model(ModelConfig(path=str(copy)))
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert f"model '{copy}' has other content than was written in model.safetensors" in refusal(copy, only_load=True)
    (copy / MANIFEST).write_text('{"name": "of another program"}')
    load_model(ModelConfig(path=str(copy)))
    (copy / MANIFEST).unlink()
    load_model(ModelConfig(path=str(copy)))


def test_pickled_weights_are_not_read(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "Only safetensors files are read, so pytorch_model.bin is not" in refusal(folder, only_load=True)


def test_weights_of_another_size_than_the_configuration_says(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=128)
    message = refusal(folder, only_load=True)
    assert "has 9 weights of other sizes than its config.json says, such as model.layers.0.mlp.down_proj" in message
    assert "[64, 256] instead of [64, 128]" in message


def test_quantized_weights(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "has quantized weights (gptq), which cannot be trained" in refusal(folder)


def test_weights_are_held_in_the_asked_type(folder: Path) -> None:
    for path in (str(folder), "tiny:micro"):
        for dtype in ("float32", "bfloat16"):
            model = load_model(ModelConfig(path=path, dtype=dtype)).model  # type: ignore[arg-type]
            assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
            assert not model.training


def test_all_end_tokens_stop_a_response(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[1, 5, 9])
    assert load_model(ModelConfig(path=str(folder))).stop_token_ids == (1, 5, 9)


def test_end_tokens_are_read_without_the_model(folder: Path) -> None:
    """An evaluation of a server stopped at the tokenizer's end token alone, and the rest of a chat was scored too."""
    tokenizer = build_tokenizer(256, chat=True)
    end, eos = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<eos>"))
    tokenizer.eos_token = "<eos>"
    edit(folder / "generation_config.json", eos_token_id=[eos, 9])
    assert read_stop_tokens(str(folder), tokenizer) == tuple(sorted({eos, 9, end}))
    (folder / "generation_config.json").unlink()
    assert read_stop_tokens(str(folder), tokenizer) == tuple(sorted({eos, end}))


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """The smallest file with weights and a tokenizer that llama.cpp's converter would write for this model."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<pad>", "<eos>", *(chr(ord("a") + i) for i in range(13)), "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    for name, weight in list_gguf_tensors(model):
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once_to_a_folder_that_saves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    original = LlamaForCausalLM(config).eval()
    write_gguf(tmp_path / "small.gguf", original)
    settings = ModelConfig(path=str(tmp_path / "small.gguf"), cache_dir=str(tmp_path / "cache"))
    loaded = load_model(settings)
    ids = torch.tensor([[2, 3, 4]])
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, original(ids).logits)
    (kept,) = (tmp_path / "cache" / "gguf").iterdir()
    made = kept.stat().st_mtime_ns
    load_model(settings)
    assert [folder.stat().st_mtime_ns for folder in (tmp_path / "cache" / "gguf").iterdir()] == [made]
    loaded.model.save_pretrained(tmp_path / "saved")
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    again = load_model(ModelConfig(path=str(tmp_path / "saved")))
    with torch.inference_mode():
        assert torch.equal(again.model(ids).logits, loaded.model(ids).logits)


def test_a_broken_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    path = tmp_path / "bad.gguf"
    assert "cannot be read as a causal language model" in refusal(path, cache_dir=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache" / "gguf").iterdir())


def test_a_response_ends_at_the_chat_templates_closing_tag(tmp_path: Path) -> None:
    model, tokenizer = build_tiny("micro-chat", 0)
    closing, eos = (tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<eos>"))
    tokenizer.eos_token = "<eos>"  # as in base models, whose template ends a turn with another token
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert {closing, eos} <= set(load_model(ModelConfig(path=str(tmp_path))).stop_token_ids)


def test_threads_load_tied_models_at_the_same_time(folder: Path) -> None:
    """transformers replaces the method that ties weights while it loads, for all threads."""

    def load(_: int) -> bool:
        model = load_model(ModelConfig(path=str(folder))).model
        return model.get_input_embeddings().weight is model.get_output_embeddings().weight

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(load, range(12)))
