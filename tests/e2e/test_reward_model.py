"""A whole run whose reward is a model, at toy size."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import interlace
from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.models.config import ModelConfig
from interlace.rewards.classifier import ModelScorer, load_classifier
from interlace.rewards.config import RewardConfig
from tests.support.reward_model import write_model
from tests.support.training import metrics, run, run_recipe, samples


@pytest.mark.parametrize("placement", [[], ["schedule.placement.reward=1", "schedule.granularity.reward=sample"]])
def test_each_response_gets_the_models_number(tmp_path: Path, placement: list[str]) -> None:
    """On the devices of its placement, a rank each."""
    path = write_model(tmp_path / "model")
    model = ["reward.name=model", f"reward.model={path}", "reward.tag=null", "reward.answer_format=text"]
    run(tmp_path, "judged", [*model, *placement, "steps=1", "reward.correct=0", "reward.shaping.length_weight=0"])
    rows, line = samples(tmp_path, "judged"), metrics(tmp_path, "judged")[0]
    scorer = ModelScorer(RewardConfig.parse({"name": "model", "model": path}), device="cpu")
    seen = [
        Sample(
            key=SampleKey(0, index),
            prompt=Prompt(uid="", token_ids=np.zeros(1, np.int32), text=str(row["prompt"]), answer=""),
            segments=(Segment(token_ids=np.array(row["token_ids"], np.int32)),),
            text=str(row["response"]),
        )
        for index, row in enumerate(rows)
    ]
    expected = [result.reward for result in scorer.score(seen)]
    assert [row["reward"] for row in rows] == pytest.approx(expected, abs=1e-4)
    assert line["reward/model"] == pytest.approx(line["reward/mean"]) == pytest.approx(np.mean(expected), abs=1e-4)


ADAPTER, HEAD_KEY = "adapter/adapter_model.safetensors", "base_model.model.score.weight"
PAIRS = [
    "task.reasoning_gym.train_size=32", "task.reasoning_gym.heldout_size=8", "logging.loggers=[]", "warmup=null",
    "prompts_per_step=4", "cluster.devices=cpu:2", "actor.lora.rank=4", "actor.lora.dropout=0.1", "optimizer.lr=0.05",
    "optimizer.warmup_steps=0", "algorithm.center_coefficient=0.01", "checkpoint_every=1",
]  # fmt: skip


def test_an_adapter_with_its_head_is_the_reward_of_a_second_run(tmp_path: Path) -> None:
    """The adapter's export, loaded by peft onto the base, scores as the merged checkpoint and as the second run."""
    peft = pytest.importorskip("peft")
    settings = [*PAIRS, f"model.cache_dir={tmp_path}"]
    run_recipe("reward-model", tmp_path, "judge", [*settings, "steps=2"])
    run_recipe("reward-model", tmp_path, "parts", [*settings, "steps=1"])
    run_recipe("reward-model", tmp_path, "parts", [*settings, "steps=2"], resume=True)
    whole, parts = (tmp_path / name / "checkpoints" / "step_2" for name in ("judge", "parts"))
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    assert not torch.allclose(*(load_file(whole.parent / f"step_{step}" / ADAPTER)[HEAD_KEY] for step in (1, 2)))

    interlace.load_run("judge", folder=tmp_path).export(tmp_path / "alone", merge=False)
    card = (tmp_path / "alone" / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(tmp_path / "alone"))
    names: dict[str, object] = {}
    exec(code, names)
    adapted = names["model"]
    assert isinstance(adapted, peft.PeftModelForSequenceClassification)
    merged = load_classifier(ModelConfig(path=str(whole))).model
    ids = torch.tensor([[40, 41, 42, 43], [50, 51, 52, 53]])
    with torch.no_grad():
        expected = merged(ids).logits
        assert torch.allclose(adapted(ids).logits, expected, atol=1e-5)

    judged = ["reward.name=model", f"reward.model={whole}", "reward.tag=null", "reward.answer_format=text"]
    run(tmp_path, "second", [*judged, "steps=1", "reward.correct=0", "reward.shaping.length_weight=0"])
    row = samples(tmp_path, "second")[0]
    text = AutoTokenizer.from_pretrained(whole)(str(row["prompt"]) + str(row["response"]), return_tensors="pt")
    with torch.no_grad():
        assert float(row["reward"]) == pytest.approx(float(merged(text["input_ids"]).logits), abs=1e-4)
