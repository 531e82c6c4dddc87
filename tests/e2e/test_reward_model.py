"""A whole run whose reward is a model, at toy size."""

from pathlib import Path

import numpy as np
import pytest

from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.rewards.base import RewardConfig
from interlace.rewards.classifier import ModelScorer
from tests.support.reward_model import write_model
from tests.support.training import metrics, run, samples


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
