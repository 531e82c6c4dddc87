"""A folder in the layout of OpenVLA-OFT's checkpoints, tiny and random, and a plain version of its decoding."""

import json
from pathlib import Path

import numpy as np
import torch

from tests.support.openvla_folder import SIDE, openvla_folder

CHUNK, SIZE, PROPRIO, HIDDEN, WIDTH = 8, 7, 8, 32, 24
DATA_SET = "libero_spatial_no_noops"
ACTION = {
    "q01": [-0.7, -0.6, -0.9, -0.1, -0.2, -0.1, 0.0], "q99": [0.9, 0.8, 0.9, 0.1, 0.2, 0.3, 1.0],
    "mask": [True] * 6 + [False],
}  # fmt: skip
STATE = {"q01": [-0.5] * PROPRIO, "q99": [0.5 + 0.1 * place for place in range(PROPRIO)]}
PROMPT_END = 40
"""Token that ends the prompt in this folder's small vocabulary."""


def openvla_oft_folder(folder: Path, *, head: bool = True) -> dict[str, dict[str, torch.Tensor]]:
    """Writes the folder. Returns the parts' weights.

    head: if True, actions come from an L1 head, else from tokens.
    """
    openvla_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"unnorm_key": DATA_SET, "last_prompt_id": PROMPT_END}
    config["text_config"]["eos_token_id"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "dataset_statistics.json").write_text(json.dumps({DATA_SET: {"action": ACTION, "proprio": STATE}}))
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * 0.2

    parts = {
        "proprio_projector": {
            "module.fc1.weight": random(HIDDEN, PROPRIO), "module.fc1.bias": random(HIDDEN),
            "module.fc2.weight": random(HIDDEN, HIDDEN), "module.fc2.bias": random(HIDDEN),
        }
    }  # fmt: skip
    if head:
        own = {"layer_norm1": (HIDDEN * SIZE,), "layer_norm2": (WIDTH,)}
        parts["action_head"] = {f"module.model.{name}.weight": random(*size) for name, size in own.items()}
        parts["action_head"] |= {f"module.model.{name}.bias": random(*size) for name, size in own.items()}
        layers = {"fc1": (WIDTH, HIDDEN * SIZE), "fc2": (SIZE, WIDTH)}
        layers |= {f"mlp_resnet_blocks.{block}.ffn.1": (WIDTH, WIDTH) for block in range(2)}
        for name, size in layers.items():
            parts["action_head"] |= {f"module.model.{name}.weight": random(*size)}
            parts["action_head"] |= {f"module.model.{name}.bias": random(size[0])}
        for block in range(2):
            for kind in ("weight", "bias"):
                parts["action_head"][f"module.model.mlp_resnet_blocks.{block}.ffn.0.{kind}"] = random(WIDTH)
    for part, weights in parts.items():
        torch.save(weights, folder / f"{part}--150000_checkpoint.pt")
    return parts


def regressed(parts: dict[str, dict[str, torch.Tensor]], hidden: torch.Tensor) -> np.ndarray:
    """Computes the L1 head for [56, hidden], as described in the paper. Returns normalised actions [8, 7]."""
    weights = {name.removeprefix("module.model."): tensor for name, tensor in parts["action_head"].items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = torch.relu(linear(norm(hidden.reshape(CHUNK, -1), "layer_norm1"), "fc1"))
    for block in range(2):
        inner = norm(x, f"mlp_resnet_blocks.{block}.ffn.0")
        x = x + torch.relu(linear(inner, f"mlp_resnet_blocks.{block}.ffn.1"))
    return linear(norm(x, "layer_norm2"), "fc2").numpy()


def simulator_actions(normalised: np.ndarray) -> np.ndarray:
    """Converts normalised actions to LIBERO's, as described: quantiles, then the sign of the gripper."""
    low, high = np.array(ACTION["q01"]), np.array(ACTION["q99"])
    actions = np.where(ACTION["mask"], (normalised + 1) / 2 * (high - low + 1e-8) + low, normalised)
    actions[:, -1] = -np.sign(2 * actions[:, -1] - 1)
    return actions


def observation() -> dict[str, np.ndarray]:
    """Returns a stored observation with LIBERO's shapes."""
    draw = np.random.default_rng(3)
    pictures = {name: draw.integers(0, 255, (SIDE, SIDE, 3), np.uint8) for name in ("image", "wrist_image")}
    return {"state": draw.normal(size=PROPRIO).astype(np.float32), **pictures}
