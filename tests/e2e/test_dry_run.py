"""A dry run prints sizes and memory for devices elsewhere, starts nothing, and the recipe for one GPU is shrunk."""

from pathlib import Path

import pytest
from transformers import Qwen2Config
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.core.errors import UserError
from interlace.forecast.dry_run import GIB, parse_devices
from interlace.models.tiny import build_tiny

SIZES = {"0.5B": (896, 4864, 24, 14, 2), "1.5B": (1536, 8960, 28, 12, 2)}
"""Published sizes of Qwen2.5: hidden, inner, layers, heads, key-value heads."""


@pytest.fixture(params=[*SIZES])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configuration of a published model, a small tokenizer and no weights."""
    monkeypatch.chdir(tmp_path)
    hidden, inner, layers, heads, kv_heads = SIZES[request.param]
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=151936, max_position_embeddings=32768, tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["Qwen2ForCausalLM"]
    _, tokenizer = build_tiny("micro", 0)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for part in (config, tokenizer):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def dry(*arguments: str) -> "tuple[int, str]":
    result = CliRunner().invoke(app, ["train", *arguments, "--dry-run"], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_the_recipe_for_one_gpu_fits_into_24_gb(model: Path) -> None:
    code, shown = dry("one-gpu", f"model.path={model}", "--devices", "1x24GB")
    assert code == 0, shown
    assert "actor/0" in shown and "rollout/0" in shown and "adapter" in shown
    assert "cuda:0" in shown and "it has 24.0 GiB: all fit at once" in shown
    assert not Path("runs").exists(), "nothing is started"
    code, shown = dry("one-gpu", f"model.path={model}", "--devices", "1x2GB")
    assert code == 2 and "needs about" in shown and "cuda:0 has 2.0 GiB" in shown


def test_one_override_shrinks_the_recipe_to_two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = [
        "steps=1",
        "prompts_per_step=2",
        "samples_per_prompt=2",
        "task.reasoning_gym.train_size=16",
        "eval_every=0",
    ]
    small = [*sizes, "task.reasoning_gym.heldout_size=2", "sampling.max_new_tokens=16", "logging.loggers=[]"]
    result = CliRunner().invoke(app, ["train", "one-gpu", "model=tiny:micro", *small, "cluster.devices=cpu:2"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "runs" / "one-gpu" / "checkpoints" / "step_1" / "adapter").is_dir()


def test_devices_are_read_by_memory_or_by_their_data_sheet() -> None:
    assert [device.memory_bytes for device in parse_devices("2x24GB")] == [24 * GIB] * 2
    assert len(parse_devices("8xH100-80GB")) == 8
    for text in ("24GB", "0x24GB", "two", "1x0GB"):
        with pytest.raises(UserError, match="write a number and the memory"):
            parse_devices(text)
    result = CliRunner().invoke(app, ["train", "sft", "--devices", "1x24GB"])
    assert result.exit_code == 2 and "is for --dry-run" in result.output
