"""A folder in the layout of openvla/openvla-7b, tiny and with random weights. Its code must not run."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from interlace.models.tiny import build_word_tokenizer
from interlace.robots.models.openvla import OpenVLAForCausalLM, register_openvla
from interlace.robots.models.openvla_config import OpenVLAConfig

SIDE = 42
TEXT = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
TOWERS = [
    {"width": 16, "depth": 3, "heads": 2, "mlp": 32, "classes": 1, "registers": 4, "scales": True},
    {"width": 24, "depth": 3, "heads": 2, "mlp": 40},
]
MEANS, STDS = [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]], [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]]
ACTION = {"q01": [-0.5], "q99": [0.75], "mask": [True]}


def openvla_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Writes the folder. Returns its weights by OpenVLA's names."""
    folder.mkdir(parents=True)
    tokenizer, _ = build_word_tokenizer(256, 0, 256)
    tokenizer.save_pretrained(folder)
    vocabulary = -(-len(tokenizer) // 64) * 64
    config = {
        "architectures": ["OpenVLAForActionPrediction"], "model_type": "openvla",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForVision2Seq": "code.Model"},
        "image_sizes": [SIDE, SIDE], "n_action_bins": 256, "pad_to_multiple_of": 64, "use_fused_vision_backbone": True,
        "norm_stats": {"dots": {"action": ACTION}}, "timm_model_ids": ["tiny_dino", "tiny_siglip"],
        "text_config": {**TEXT, "vocab_size": vocabulary + 64}, "tower_shapes": TOWERS, "torch_dtype": "float32",
    }  # fmt: skip
    processor = {"image_processor_type": "PrismaticImageProcessor", "means": MEANS, "stds": STDS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "code.py").write_text("raise SystemExit('the code of a folder ran')")
    register_openvla()
    flat = OpenVLAConfig.from_dict(dict(config), name_or_path=str(folder))
    assert isinstance(flat, LlamaConfig) and flat.vocab_size == vocabulary + 64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OpenVLAForCausalLM(flat).float()
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.1)
    weights = {_published(name): tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def _published(name: str) -> str:
    if name.startswith("model.projector."):
        inner = name.removeprefix("model.projector.")
        return inner if inner.startswith("vision_backbone.") else f"projector.{inner}"
    return f"language_model.{name}"
