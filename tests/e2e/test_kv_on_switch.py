"""A device too small for two workers changes hands during sequences without any effect on samples."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interlace.run.clusters import local
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.memory import forecast_run, working_bytes
from interlace.run.recipe.sections import ClusterConfig
from interlace.schedule.placement import Device
from tests.support.training import SMALL, final_weights, run, samples

SETTINGS = (
    "steps=2",
    "algorithm.kl_coefficient=0.1",
    "schedule.switch=when_ready",
    "schedule.granularity={reward: sample, reference: sample, actor: step}",
    "schedule.concurrency=3",
    "rollout.max_tokens=4096",
    "tokens_per_microbatch=64",  # or the actor's activations would be what the device must hold
    # Rewards that differ within a group: gradients that are more than rounding.
    "reward.name=tests.support.reward_functions:length",
    "reward.tag=null",
    "reward.answer_format=text",
)


@pytest.fixture
def _crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device, with memory for the largest worker alone, while it computes."""
    recipe = load_recipe("quickstart", [*SMALL, *SETTINGS])
    roomy = Device(index=0, pool="cpu", pool_index=0, memory_bytes=2**34)
    derived = check_recipe(recipe)
    working = working_bytes(forecast_run(recipe, (roomy,), derived.max_prompt_tokens).workers)
    states = {worker.worker.partition("/")[0]: worker.num_bytes for worker in derived.memory}
    largest = max(num_bytes + working[role] for role, num_bytes in states.items())
    device = replace(roomy, memory_bytes=largest + min(states.values()) // 2)

    def find_devices(config: ClusterConfig) -> tuple[Device, ...]:
        return (device,)

    monkeypatch.setattr(local, "find_devices", find_devices)


def re_prefill(root: Path, name: str) -> float:

    lines = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    assert all(line["timing_s/switch"] > 0 for line in lines), "the device changed hands"
    return sum(line["goodput/re_prefill"] for line in lines)


@pytest.mark.usefixtures("_crowded")
def test_running_sequences_go_on_as_if_they_had_never_left(tmp_path: Path) -> None:
    for kv in ("offload", "recompute"):
        run(tmp_path, kv, [*SETTINGS, f"schedule.kv_on_switch={kv}"])
    run(tmp_path, "alone", [setting for setting in SETTINGS if "switch" not in setting])
    assert re_prefill(tmp_path, "offload") == 0 < re_prefill(tmp_path, "recompute")
    alone = final_weights(tmp_path, "alone")
    expected = sorted(str((row["uid"], row["index"], row["token_ids"])) for row in samples(tmp_path, "alone"))
    for kv in ("offload", "recompute"):
        found = sorted(str((row["uid"], row["index"], row["token_ids"])) for row in samples(tmp_path, kv))
        assert found == expected
        # The reference packs what has arrived, so its log-probs, and the sums of the KL term, are rounded anew.
        ours = final_weights(tmp_path, kv)
        assert all(torch.allclose(ours[name], theirs, rtol=0, atol=1e-5) for name, theirs in alone.items())
