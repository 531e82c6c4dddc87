"""Whole runs that train an adapter, at toy size."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from interlace.engines.train.export import ADAPTER_FOLDER
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.simulate import Simulation, simulate
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.run.recipe.load import load_recipe
from interlace.run.warmup import WARMUP_FILE
from tests.support.training import equal_weights, final_weights, metrics, run, samples

pytest.importorskip("peft")
LORA = ("actor.lora.rank=8", "optimizer.lr=3e-3", "minibatches=1", "algorithm.kl_coefficient=0.1", "steps=3")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds an uninterrupted run called `whole`, whose reference is the base under the adapter."""
    root = tmp_path_factory.mktemp("runs")
    run(root, "whole", LORA)
    return root


def newest(root: Path, name: str) -> Path:
    return max((root / name / "checkpoints").iterdir(), key=lambda path: path.name)


def test_a_run_moves_away_from_its_base_by_the_adapter_alone(root: Path) -> None:
    kl = [line["actor/ref_kl"] for line in metrics(root, "whole")]
    assert kl[0] < 1e-6 < kl[2]
    adapter = load_file(newest(root, "whole") / ADAPTER_FOLDER / "adapter_model.safetensors")
    assert all(tensor.any() for tensor in adapter.values())
    base = json.loads((root / "whole" / WARMUP_FILE).read_text())["folder"]
    before, after = load_file(Path(base) / "model.safetensors"), final_weights(root, "whole")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(root: Path) -> None:
    assert run(root, "stopped", LORA, stop_after=1).was_stopped
    assert run(root, "stopped", LORA, resume=True).done_steps == 3
    assert metrics(root, "stopped") == metrics(root, "whole")
    assert samples(root, "stopped") == samples(root, "whole")
    assert equal_weights(final_weights(root, "stopped"), final_weights(root, "whole"))


def test_a_reference_of_its_own_says_the_same(root: Path) -> None:
    """Where the reference is not with the actor it is a second model, of the same log-probs."""
    run(root, "apart", [*LORA, "schedule.placement.actor=0", "schedule.placement.reference=1"])
    ours, theirs = final_weights(root, "apart"), final_weights(root, "whole")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5


def test_an_adapter_that_travels_alone_brings_the_same_samples_and_weights(root: Path) -> None:
    """Also where the run was stopped: its engines start from the base, and not from the checkpoint's merged folder."""
    alone = [*LORA, "weights.adapter=alone", "weights.transport=shared_memory"]
    assert run(root, "alone", alone, stop_after=1).was_stopped
    assert run(root, "alone", alone, resume=True).done_steps == 3
    assert samples(root, "alone") == samples(root, "whole")
    assert equal_weights(final_weights(root, "alone"), final_weights(root, "whole"))


DORA = [
    *LORA, "weights.adapter=alone", "schedule=dora", "cluster.devices=cpu:4", "schedule.placement.rollout=0",
    "rollout.max_running=4", "rollout.compile_decoder=false", "steps=6",
]  # fmt: skip


def test_under_dora_one_engine_serves_adapters_side_by_side_and_each_sequence_ends_under_its_own(root: Path) -> None:
    run(root, "dora", DORA)
    rows = RunData.read(RunFolder.named(root, "dora")).rows
    assert max(row["rollout/older_versions"] for row in rows) > 0
    assert all(row["sched/mixed_versions"] == 0 for row in rows)
    assert max(row["sched/staleness_max"] for row in rows) >= 1


def test_the_simulator_serves_adapters_side_by_side_too() -> None:
    """An engine of whole weights drains at each update: it has no older version then."""
    profile = load_profile("qwen2.5-7b-h800")
    fields = {
        "actor": profile.actor.model_copy(update={"state_bytes": 0}),
        "rollout": profile.rollout.model_copy(update={"max_running": 2, "update_s": 0.0}),
        "lengths": profile.lengths.model_copy(update={"median": 20.0}),
    }
    profile = profile.model_copy(update=fields)
    for adapter in ("alone", "merged"):
        recipe = load_recipe("quickstart", [*DORA, f"weights.adapter={adapter}", "steps=12"])
        simulated = simulate(recipe, Simulation(profile=profile, num_devices=4))
        assert all(row["sched/mixed_versions"] == 0 for row in simulated.run.rows)
        assert any(row["rollout/older_versions"] for row in simulated.run.rows) == (adapter == "alone")
