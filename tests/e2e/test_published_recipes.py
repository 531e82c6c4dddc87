"""Recipes at the size of published runs pass everything that needs no GPU: check, memory, simulation, plan.

The weights are absent; the sizes come from the published configurations, written here, and the tokenizer is small.
"""

import json
import re
from pathlib import Path

import pytest
from transformers import PretrainedConfig, Qwen2Config, Qwen3MoeConfig

import interlace
from interlace.models.tiny import build_tiny
from interlace.robots.episodes.robot import RobotKind
from interlace.run.clusters import local
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from tests.support.openvla_oft_folder import openvla_oft_folder

FOLDER = Path(__file__).parents[2] / "examples" / "published"
GIB = 2**30


def qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, *, tied: bool = False) -> PretrainedConfig:
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=152064 if not tied else 151936, max_position_embeddings=131072,
        tie_word_embeddings=tied,
    )  # fmt: skip


CONFIGS = {
    "qwen2.5-1.5b-grpo": (qwen2(1536, 8960, 28, 12, 2, tied=True), 1.54e9),
    "qwen2.5-7b-grpo": (qwen2(3584, 18944, 28, 28, 4), 7.62e9),
    "qwen2.5-32b-grpo": (qwen2(5120, 27648, 64, 40, 8), 32.8e9),
    "qwen3-30b-a3b-grpo": (
        Qwen3MoeConfig(
            hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
            num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
            norm_topk_prob=True, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False,
        ),
        30.5e9,
    ),
}  # fmt: skip
"""Recipe -> configuration of its model, and the number of parameters that the model card gives."""


def test_every_recipe_of_the_folder_is_checked() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*CONFIGS, "openvla-oft-libero"}
    assert all("Not run here" in path.read_text() for path in FOLDER.glob("*.yaml"))


@pytest.fixture
def changes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Changes that replace the hub's model and data by local ones; the machine has the recipe's GPUs of 80 GiB."""
    config, _ = CONFIGS[request.param]
    _, tokenizer = build_tiny("micro", 0)
    config.architectures = ["Qwen3MoeForCausalLM" if "moe" in config.model_type else "Qwen2ForCausalLM"]
    for part in (config, tokenizer):
        part.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{n} + 1", "reward_model": {"ground_truth": str(n + 1)}} for n in range(4096)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [devices] = re.findall(r"cuda:(\d+)", (FOLDER / f"{request.param}.yaml").read_text())
    monkeypatch.setattr(local, "_gpu_bytes", lambda: (80 * GIB,) * int(devices))
    monkeypatch.chdir(tmp_path)
    return [
        f"model.path={tmp_path}/model", "task.hub=null", f"task.files.train={tmp_path}/rows.jsonl",
        "task.files.heldout_size=256", "cluster.backend=local", "rollout=native",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "name"), [(name, name) for name in CONFIGS], indirect=["changes"])
def test_the_recipe_has_the_published_size_and_fits(changes: list[str], name: str) -> None:
    derived = check_recipe(load_recipe(str(FOLDER / f"{name}.yaml"), changes))
    assert derived.num_parameters == pytest.approx(CONFIGS[name][1], rel=0.02)
    assert max(worker.peak_bytes for worker in derived.memory) < 80 * GIB
    assert derived.samples_per_step == 128 * 16


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "name"), [(name, name) for name in CONFIGS], indirect=["changes"])
def test_the_recipe_is_planned_for_its_devices(changes: list[str], name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    [devices] = re.findall(r"cuda:(\d+)", path.read_text())
    planned = interlace.plan(str(path), [*changes, "plan.search_s=20"], devices=f"{devices}xH100-80GB", quiet=True)
    assert 10 < planned.step_s < 3600


@pytest.mark.slow
@pytest.mark.parametrize("changes", ["qwen2.5-7b-grpo"], indirect=True)
def test_seven_billion_parameters_are_simulated_with_a_measured_profile(changes: list[str]) -> None:
    path = str(FOLDER / "qwen2.5-7b-grpo.yaml")
    table = interlace.simulate(path, [*changes, "steps=3"], devices=64, profile="qwen2.5-7b-h800")
    [row] = table.rows
    assert row["schedule"] == "areal" and 10 < float(row["step_s"]) < 36000


OPENVLA_BODY = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 2048, "vocab_size": 32064,
}  # fmt: skip
OPENVLA_TOWERS = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]


@pytest.fixture
def openvla_oft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Changes of the recipe: a folder with the published sizes and no weights; the machine has eight GPUs.

    LIBERO is not installed, so the policy is not compared with the spaces of its simulator.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "_gpu_bytes", lambda: (80 * GIB,) * 8)
    monkeypatch.setattr(RobotKind, "check_policy", lambda self, actions: None)
    folder = tmp_path / "model"
    openvla_oft_folder(folder, head=False)
    config = json.loads((folder / "config.json").read_text())
    del config["tower_shapes"]
    config |= {"timm_model_ids": OPENVLA_TOWERS, "image_sizes": [224, 224]}
    config["text_config"] |= OPENVLA_BODY
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    return [f"model.path={folder}"]


@pytest.mark.slow
def test_openvla_oft_has_the_published_size_and_fits(openvla_oft: list[str]) -> None:
    derived = check_recipe(load_recipe(str(FOLDER / "openvla-oft-libero.yaml"), openvla_oft))
    assert derived.num_parameters == pytest.approx(7.54e9, rel=0.01)
    assert derived.samples_per_step == 512
    assert sum(worker.peak_bytes for worker in derived.memory if worker.worker in ("rollout/0", "actor/0")) < 80 * GIB


@pytest.mark.slow
def test_openvla_oft_is_simulated_and_planned(openvla_oft: list[str]) -> None:
    """The plan has an eighth of the episodes, so that the search simulates several schedules in its time."""
    path = str(FOLDER / "openvla-oft-libero.yaml")
    table = interlace.simulate(path, [*openvla_oft, "steps=2"], devices=8, profile="rlinf-libero")
    assert len(table.rows) == 1
    changes = [*openvla_oft, "prompts_per_step=8", "plan.search_s=60"]
    planned = interlace.plan(path, changes, devices="8", profile="rlinf-libero", quiet=True)
    assert 1 < planned.step_s < 3600
