"""A folder in OpenVLA's layout: names of weights, statistics of the processor, actions, and a run on it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from interlace.core.errors import UserError
from interlace.engines.train.export import save_model
from interlace.models.action_tokens import action_tokens
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.robots.models.openvla import OpenVLAProjector, VisionTower
from interlace.robots.models.openvla_config import TowerShape
from tests.support.openvla_folder import MEANS, SIDE, STDS, TOWERS, openvla_folder
from tests.support.training import metrics, run_recipe


def test_a_folder_loads_by_its_own_names_without_its_code(tmp_path: Path) -> None:
    weights = openvla_folder(tmp_path / "openvla")
    loaded = load_model(ModelConfig(path=str(tmp_path / "openvla"), trust_remote_code=True))
    found = loaded.model.state_dict()
    assert len(found) == len(weights)
    assert torch.equal(found["lm_head.weight"], weights["language_model.lm_head.weight"])
    for name in ("vision_backbone.fused_featurizer.blocks.1.attn.qkv.weight", "projector.fc3.bias"):
        own = name if name.startswith("vision") else name.removeprefix("projector.")
        assert torch.equal(found[f"model.projector.{own}"], weights[name])
    actions = action_tokens(loaded.model.config)
    assert actions is not None and actions.num_bins == 255 and actions.reads.per_observation == 9
    vocabulary = loaded.model.config.vocab_size - 64
    assert actions.first_id == vocabulary - 1, "the last tokens of the vocabulary, downwards"
    np.testing.assert_allclose(actions.decode([vocabulary - 1, vocabulary - 255])[:, 0], [-0.4975, 0.7475], atol=1e-3)
    assert actions.context([5, 6, 7]) == [5, *actions.placeholders, 6, 7]


def test_what_is_saved_loads_again(tmp_path: Path) -> None:
    openvla_folder(tmp_path / "openvla")
    first = load_model(ModelConfig(path=str(tmp_path / "openvla")))
    save_model(first.model, tmp_path / "saved", first.tokenizer)
    second = load_model(ModelConfig(path=str(tmp_path / "saved")))
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert second.model.config.image_means == MEANS and second.model.config.image_stds == STDS


def test_each_tower_sees_images_by_its_own_means(tmp_path: Path) -> None:
    openvla_folder(tmp_path / "openvla")
    model = load_model(ModelConfig(path=str(tmp_path / "openvla"))).model
    projector = model.base_model.projector
    assert isinstance(projector, OpenVLAProjector)
    image = np.random.default_rng(0).integers(0, 255, (2, SIDE, SIDE, 3), np.uint8)
    with torch.no_grad():
        found = projector({"image": torch.from_numpy(image)})
        features = [
            tower(torch.from_numpy(((image / 255 - mean) / std).astype(np.float32)).permute(0, 3, 1, 2))
            for tower, mean, std in zip(projector.vision_backbone.children(), MEANS, STDS, strict=True)
        ]
        x = torch.nn.functional.gelu(projector.fc1(torch.cat(features, -1)))
        wanted = projector.fc3(torch.nn.functional.gelu(projector.fc2(x)))
    assert found.shape == (2, 9, 32)
    torch.testing.assert_close(found, wanted)


def test_towers_compute_what_timm_s_do() -> None:
    timm = pytest.importorskip("timm.models.vision_transformer")
    for sizes in TOWERS:
        shape = TowerShape(**sizes)
        kind = {"class_token": bool(shape.classes), "reg_tokens": shape.registers, "no_embed_class": True}
        theirs = timm.VisionTransformer(
            img_size=SIDE, patch_size=14, embed_dim=shape.width, depth=shape.depth, num_heads=shape.heads,
            mlp_ratio=shape.mlp / shape.width, init_values=1e-5 if shape.scales else None, num_classes=0,
            global_pool="token" if shape.classes else "map", **kind,
        ).eval()  # fmt: skip
        for parameter in theirs.parameters():
            parameter.data.normal_(0, 0.1)
        ours = VisionTower(shape, SIDE)
        state = {name.replace(".gamma", ".scale_factor"): tensor for name, tensor in theirs.state_dict().items()}
        assert not ours.load_state_dict(state, strict=False).missing_keys
        images = torch.randn(2, 3, SIDE, SIDE)
        with torch.no_grad():
            wanted = theirs.get_intermediate_layers(images, n={shape.depth - 2})[0]
            torch.testing.assert_close(ours(images), wanted, atol=1e-5, rtol=1e-5)


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    openvla_folder(tmp_path / "openvla")
    (tmp_path / "openvla" / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"no preprocessor_config\.json"):
        load_model(ModelConfig(path=str(tmp_path / "openvla")))


def test_an_unknown_tower_is_named(tmp_path: Path) -> None:
    openvla_folder(tmp_path / "openvla")
    file = tmp_path / "openvla" / "config.json"
    config = json.loads(file.read_text())
    del config["tower_shapes"]
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="image tower 'tiny_dino' is not known here"):
        load_model(ModelConfig(path=str(tmp_path / "openvla")))


def test_a_run_trains_such_a_folder(tmp_path: Path) -> None:
    openvla_folder(tmp_path / "openvla")
    settings = [
        f"model={{path: {tmp_path / 'openvla'}}}", "episode.env.family=tests.support.dot_simulator:Dot",
        "episode.env.settings={tasks: [near], horizon: 3}", "episode.features=[]", "episode.reward=return",
        "algorithm={name: grpo}", "steps=2", "prompts_per_step=2", "samples_per_prompt=2", "minibatches=1",
        "task.starts.train_size=16", "task.starts.heldout_size=2", "logging.loggers=[]", "cluster.devices=cpu:1",
        "cluster.threads_per_worker=1",
    ]  # fmt: skip
    report = run_recipe("robot-cartpole", tmp_path, "run", settings)
    assert report.done_steps == 2
    for line in metrics(tmp_path, "run"):
        assert line["actor/logprob_gap"] < 1e-5 and line["actor/grad_norm"] > 0 and line["env/episode_length"] <= 3
    saved = load_model(ModelConfig(path=str(tmp_path / "run" / "checkpoints" / "step_2")))
    assert saved.model.config.model_type == "openvla"
