"""Folders in LeRobot's layout for SmolVLA, pi0 and pi0.5, tiny and with random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, SmolVLMConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMForConditionalGeneration

from interlace.models.tiny import build_word_tokenizer

HIDDEN, EXPERT, LAYERS, CHUNK, PADDED, SIZE, STATES = 64, 48, 4, 6, 8, 3, 5
TEXT = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 600, "rope_theta": 10000.0,
    "pad_token_id": 2,
}  # fmt: skip
EYE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SMOLVLM = {"text_config": TEXT, "vision_config": {**EYE, "image_size": 64, "patch_size": 16}, "scale_factor": 2}
GEMMA = {
    "model_type": "gemma", "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 600,
}  # fmt: skip
SIGLIP = {**EYE, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14, "vision_use_head": False}


def flow_vla_folder(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Writes a folder. Returns its weights by their published names."""
    folder.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = _smolvla(folder) if kind == "smolvla" else _pi(kind)
        for name, tensor in weights.items():
            is_norm = "norm" in name and "dense" not in name
            tensor.data = torch.randn_like(tensor) * 0.15 + (1.0 if is_norm and kind == "smolvla" else 0.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _settings(folder, kind)
    return weights


def _settings(folder: Path, kind: str) -> None:
    settings = {
        "type": kind, "chunk_size": CHUNK, "n_action_steps": 2, "max_state_dim": PADDED, "max_action_dim": PADDED,
        "input_features": {
            "observation.images.front": {"type": "VISUAL", "shape": [3, 48, 64]},
            "observation.state": {"type": "STATE", "shape": [STATES]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [SIZE]}},
    }  # fmt: skip
    if kind == "smolvla":
        settings |= {"resize_imgs_with_padding": [64, 64], "num_steps": 4, "vlm_model_name": "vlm"}
    else:
        settings |= {"image_resolution": [56, 56], "num_inference_steps": 4, "vision_heads": 2}
    modes = (
        {"STATE": "QUANTILES", "ACTION": "QUANTILES"} if kind == "pi05" else {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    )
    file = "policy_preprocessor_step_5_normalizer_processor.safetensors"
    steps = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "normalizer_processor", "config": {"norm_map": {"VISUAL": "IDENTITY", **modes}},
         "state_file": file},
    ]  # fmt: skip
    draw = torch.Generator().manual_seed(5)
    stats = {}
    for name, size in (("observation.state", STATES), ("action", SIZE)):
        stats |= {
            f"{name}.mean": torch.randn(size, generator=draw),
            f"{name}.std": torch.rand(size, generator=draw) + 0.5,
        }
        stats |= {f"{name}.q01": torch.full((size,), -2.0), f"{name}.q99": torch.arange(size) + 1.0}
    save_file(stats, folder / file)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    build_word_tokenizer(16, 0, 256)[0].save_pretrained(folder / "tokenizer")


def _smolvla(folder: Path) -> dict[str, torch.Tensor]:
    (folder / "vlm").mkdir()
    (folder / "vlm" / "config.json").write_text(json.dumps({"model_type": "smolvlm", **SMOLVLM}))
    vlm = SmolVLMForConditionalGeneration(SmolVLMConfig(**SMOLVLM))
    found = {f"model.vlm_with_expert.vlm.{name}": tensor.clone() for name, tensor in vlm.state_dict().items()}
    expert = "model.vlm_with_expert.lm_expert"
    for layer in range(LAYERS):
        inputs = EXPERT if layer % 2 == 0 else 32  # odd layers read the prefix's keys and values
        sizes = {"q_proj": (64, EXPERT), "k_proj": (32, inputs), "v_proj": (32, inputs), "o_proj": (EXPERT, 64)}
        found |= _layer(f"{expert}.layers.{layer}", sizes, EXPERT)
    found[f"{expert}.norm.weight"] = torch.zeros(EXPERT)
    return found | _heads({
        "state_proj": (HIDDEN, PADDED), "action_in_proj": (EXPERT, PADDED), "action_out_proj": (PADDED, EXPERT),
        "action_time_mlp_in": (EXPERT, 2 * EXPERT), "action_time_mlp_out": (EXPERT, EXPERT),
    })  # fmt: skip


def _pi(kind: str) -> dict[str, torch.Tensor]:
    model = PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(text_config=GEMMA, vision_config={**SIGLIP, "projection_dim": HIDDEN}, projection_dim=HIDDEN)
    )
    found = {}
    for name, tensor in model.state_dict().items():
        published = name.replace("vision_tower.", "vision_tower.vision_model.")
        if ".embed_tokens." not in name:  # tied to the output layer
            found[f"model.paligemma_with_expert.paligemma.{published}"] = tensor.clone()
    expert = "model.paligemma_with_expert.gemma_expert.model"
    adaptive = kind == "pi05"
    for layer in range(LAYERS):
        sizes = {"q_proj": (64, EXPERT), "k_proj": (8, EXPERT), "v_proj": (8, EXPERT), "o_proj": (EXPERT, 64)}
        found |= _layer(f"{expert}.layers.{layer}", sizes, EXPERT, adaptive=adaptive)
    found |= _norm(f"{expert}.norm", EXPERT, adaptive=adaptive)
    heads = {"action_in_proj": (EXPERT, PADDED), "action_out_proj": (PADDED, EXPERT)}
    if adaptive:
        return found | _heads({**heads, "time_mlp_in": (EXPERT, EXPERT), "time_mlp_out": (EXPERT, EXPERT)})
    heads |= {"state_proj": (EXPERT, PADDED), "action_time_mlp_out": (EXPERT, EXPERT)}
    return found | _heads({**heads, "action_time_mlp_in": (EXPERT, 2 * EXPERT)})


def _layer(
    name: str, attention: dict[str, tuple[int, int]], width: int, *, adaptive: bool = False
) -> dict[str, torch.Tensor]:
    mlp = {"gate_proj": (96, width), "up_proj": (96, width), "down_proj": (width, 96)}
    found = {f"{name}.self_attn.{part}.weight": torch.zeros(size) for part, size in attention.items()}
    found |= {f"{name}.mlp.{part}.weight": torch.zeros(size) for part, size in mlp.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found |= _norm(f"{name}.{norm}", width, adaptive=adaptive)
    return found


def _norm(name: str, width: int, *, adaptive: bool) -> dict[str, torch.Tensor]:
    if adaptive:
        return {f"{name}.dense.weight": torch.zeros(3 * width, width), f"{name}.dense.bias": torch.zeros(3 * width)}
    return {f"{name}.weight": torch.zeros(width)}


def _heads(sizes: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}.weight": torch.zeros(size) for name, size in sizes.items()}
    return found | {f"model.{name}.bias": torch.zeros(size[0]) for name, size in sizes.items()}
