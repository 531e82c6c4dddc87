"""Complete runs over each transport give the same samples and weights as with the trainer's tensors."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_training import Said
from tests.support.mixture import save_mixture
from tests.support.training import equal_weights, final_weights, run, samples

# Something is learned: an untrained model's answers are all wrong, but not all of one length.
LENGTHS = ("reward.name=tests.support.reward_functions:length", "reward.tag=null", "reward.answer_format=text")
WIRED = ("object_store", "gloo", "folder")


def drawn(root: Path, name: str) -> list[tuple[object, ...]]:
    return [(row["uid"], row["index"], row["token_ids"]) for row in samples(root, name)]


def test_every_transport_trains_to_the_same_weights(tmp_path: Path) -> None:
    settings = [*LENGTHS, "steps=2", f"weights.folder={tmp_path / 'versions'}"]
    heard = Said()
    run(tmp_path, "alias", settings, progress=heard)
    assert "weights: alias, raw (trainer and engines are one process)" in heard.lines
    for transport in ("shared_memory", *WIRED):
        run(tmp_path, transport, [*settings, f"weights.transport={transport}"])
        assert drawn(tmp_path, transport) == drawn(tmp_path, "alias")
        assert equal_weights(final_weights(tmp_path, transport), final_weights(tmp_path, "alias"))


@pytest.mark.slow  # six runs
@pytest.mark.parametrize("schedule", ["verl-colocated", "pipelinerl"])
def test_deltas_and_schedules_that_run_ahead_bring_the_same_weights(tmp_path: Path, schedule: str) -> None:
    settings = [*LENGTHS, "steps=3", f"schedule={schedule}", "optimizer.lr=1e-5", "model.dtype=bfloat16"]
    run(tmp_path, "alias", settings)
    for transport in WIRED:
        wired = [f"weights.transport={transport}", "weights.codec=delta", f"weights.folder={tmp_path / 'versions'}"]
        run(tmp_path, transport, [*settings, *wired])
        if schedule == "verl-colocated":  # elsewhere which version drew a token depends on the time
            assert drawn(tmp_path, transport) == drawn(tmp_path, "alias")
            assert equal_weights(final_weights(tmp_path, transport), final_weights(tmp_path, "alias"))


@pytest.mark.parametrize("kind", ["tiny:micro", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_version_folder_is_one_that_transformers_loads(tmp_path: Path, kind: str) -> None:
    """The mixture is trained by two ranks: its experts are dealt out, and saved one by one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    versions, settings = tmp_path / "versions", [*LENGTHS, "steps=2"]
    if kind != "tiny:micro":
        model = save_mixture(tmp_path / "model", kind)
        settings += [f"model={model}", "warmup=null", "actor.expert_parallel=2"]
    run(tmp_path, "folder", [*settings, "weights.transport=folder", f"weights.folder={versions}"])
    newest = max(versions.glob("version-*"))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "folder" / "checkpoints" / "step_2").state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(newest)
    assert equal_weights(loaded.state_dict(), expected)
    index = json.loads((newest / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == final_weights(tmp_path, "folder").keys()
    assert AutoTokenizer.from_pretrained(newest).decode([70, 71]) == "ef"
