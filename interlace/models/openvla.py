"""Policies in the layout of OpenVLA's folders (arXiv 2406.09246): image towers, a projector, a Llama body.

A folder is read by its own configuration, its image processor's numbers and its weights' names; code that it ships is
not run. A checkpoint of a run has one flat configuration, with what was read of the processor in it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.llama.modeling_llama import LlamaForTokenClassification

from interlace.core.errors import UserError, nearest
from interlace.models.config import OPENVLA_TYPE
from interlace.models.vla import EmbedsArrays

PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerShape:
    """Sizes of an image tower, a vision transformer with timm's names of its parameters."""

    width: int
    depth: int
    """Layers; the features are those of the last but one."""
    heads: int
    mlp: int
    patch: int = 14
    classes: int = 0
    """Class tokens, 0 or 1."""
    registers: int = 0
    scales: bool = False
    """Flag: what a layer adds is scaled by learned numbers."""

    @property
    def num_prefix(self) -> int:
        """Returns the tokens before those of patches."""
        return self.classes + self.registers


TOWERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerShape(
        width=1024, depth=24, heads=16, mlp=4096, classes=1, registers=4, scales=True
    ),
    "vit_so400m_patch14_siglip_224": TowerShape(width=1152, depth=27, heads=16, mlp=4304),
}
"""By timm's name."""


class OpenVLAConfig(LlamaConfig):
    """A Llama body, and what the policy sees and does; written by OpenVLA with the body's sizes in `text_config`."""

    model_type = OPENVLA_TYPE
    timm_model_ids: list[str] | None = None
    tower_shapes: list[dict[str, Any]] | None = None
    """Sizes of towers that timm_model_ids names and TOWERS does not have; None: there are none."""
    image_sizes: list[int] | None = None
    image_means: list[list[float]] | None = None
    """[towers, 3] of the image processor, of channels between 0 and 1."""
    image_stds: list[list[float]] | None = None
    norm_stats: dict[str, Any] | None = None
    """By data set: `action`, with `q01`, `q99` and `mask`."""
    unnorm_key: str | None = None
    """Data set whose statistics actions are read by; None where there is one alone."""
    n_action_bins: int = 256
    pad_to_multiple_of: int = 64
    """Embeddings behind the vocabulary, of which the last one is the placeholder."""
    state_size: int = 0

    @classmethod
    def from_dict(  # house: the signature is transformers'
        cls, config_dict: dict[str, Any], **given: Any
    ) -> "OpenVLAConfig":
        """Reads either layout; the image processor's numbers where its file lies beside."""
        flat = {name: value for name, value in (config_dict.get("text_config") or {}).items() if name != "model_type"}
        flat |= {name: value for name, value in config_dict.items() if name not in ("text_config", "auto_map")}
        file = Path(str(given.get("name_or_path", ""))) / PROCESSOR
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            flat |= {"image_means": found["means"], "image_stds": found["stds"]}
        config: OpenVLAConfig = super().from_dict(flat, **given)
        return config

    @property
    def image_size(self) -> int:
        """Returns the pixels on a side of the camera's image."""
        return (self.image_sizes or [224])[0]

    @property
    def image_tokens(self) -> int:
        """Returns the patches, each one vector."""
        return (self.image_size // self.towers[0].patch) ** 2

    @property
    def placeholder_token_id(self) -> int:
        """Returns a token that no text has."""
        return self.vocab_size - 1

    @property
    def towers(self) -> Sequence[TowerShape]:
        """Returns the sizes of the towers. UserError for one that is not known."""
        if self.tower_shapes:
            return [TowerShape(**shape) for shape in self.tower_shapes]
        names = self.timm_model_ids or []
        for name in names:
            if name not in TOWERS:
                raise UserError(f"OpenVLA's image tower {name!r} is not known here.{nearest(name, TOWERS)}")
        return [TOWERS[name] for name in names]


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _Heads(nn.Module):  # not Attention, by which name transformers would look for its attention interface
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.qkv, self.proj = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)

    def forward(self, x_NPD: Tensor) -> Tensor:
        query, key, value = self.qkv(x_NPD).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(shape.width, shape.mlp), nn.Linear(shape.mlp, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class _Block(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(shape.width, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = _Heads(shape), _Mlp(shape)
        self.ls1, self.ls2 = (_Scale(shape.width) if shape.scales else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTower(nn.Module):
    """A vision transformer up to its last layer but one."""

    def __init__(self, shape: TowerShape, side: int) -> None:
        super().__init__()
        self._num_prefix = shape.num_prefix
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, shape.width, shape.patch, stride=shape.patch)})
        self.pos_embed = nn.Parameter(torch.zeros(1, (side // shape.patch) ** 2, shape.width))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width)) if shape.classes else None
        self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, shape.width)) if shape.registers else None
        self.blocks = nn.ModuleList([_Block(shape) for _ in range(shape.depth)])
        self.blocks[-1].requires_grad_(False)  # nothing reads the last one; it stays, as in the folder

    def forward(self, images: Tensor) -> Tensor:
        """Computes [N, patches, width] from normalised images [N, 3, side, side]."""
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2) + self.pos_embed
        before = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        x = torch.cat([*before, x], 1)
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, self._num_prefix :]


class _Backbone(nn.Module):
    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        towers = [VisionTower(shape, config.image_size) for shape in config.towers]
        self.featurizer = towers[0]
        self.fused_featurizer = towers[1] if len(towers) > 1 else None


class OpenVLAProjector(nn.Module):
    """Embeds images: the towers' features side by side, then two layers for one tower and three for two."""

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        self.vision_backbone = _Backbone(config)
        features, hidden = sum(shape.width for shape in config.towers), config.hidden_size
        is_fused = self.vision_backbone.fused_featurizer is not None
        between = 4 * features if is_fused else hidden
        self.fc1, self.fc2 = nn.Linear(features, between), nn.Linear(between, hidden)
        self.fc3 = nn.Linear(hidden, hidden) if is_fused else None
        if config.image_means is None or config.image_stds is None:
            raise UserError(
                f"the policy's folder has no {PROCESSOR}, whose means and stds images are normalised by. Copy it there."
            )
        self._means, self._stds = config.image_means, config.image_stds

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Computes [N, patches, hidden] from {"image": [N, side, side, 3]}."""
        images = inputs["image"].to(self.fc1.weight.dtype).permute(0, 3, 1, 2) / 255
        found = []
        for place, tower in enumerate(self.vision_backbone.children()):
            mean, std = (images.new_tensor(numbers[place])[:, None, None] for numbers in (self._means, self._stds))
            found.append(tower((images - mean) / std))
        x = self.fc2(F.gelu(self.fc1(torch.cat(found, -1))))
        return x if self.fc3 is None else self.fc3(F.gelu(x))


class OpenVLAModel(EmbedsArrays, LlamaModel):
    """The body, whose forward takes named arrays beside the tokens."""

    config_class = OpenVLAConfig

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        self.projector = OpenVLAProjector(config)
        self.post_init()


class OpenVLAForCausalLM(LlamaForCausalLM):
    """The policy."""

    config_class = OpenVLAConfig

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        self.model = OpenVLAModel(config)
        self.post_init()


class OpenVLAForTokenClassification(LlamaForTokenClassification):
    """The critic: one value at each token."""

    config_class = OpenVLAConfig

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        self.model = OpenVLAModel(config)
        self.post_init()


def register_openvla() -> None:
    """Makes the layout known to transformers' Auto classes, and its weights' names."""
    AutoConfig.register(OPENVLA_TYPE, OpenVLAConfig, exist_ok=True)
    AutoModel.register(OpenVLAConfig, OpenVLAModel, exist_ok=True)
    AutoModelForCausalLM.register(OpenVLAConfig, OpenVLAForCausalLM, exist_ok=True)
    AutoModelForTokenClassification.register(OpenVLAConfig, OpenVLAForTokenClassification, exist_ok=True)
    renamed = {
        r"^language_model\.lm_head\.": "lm_head.",
        r"^language_model\.model\.": "model.",
        r"^vision_backbone\.": "model.projector.vision_backbone.",
        r"^projector\.": "model.projector.",
    }
    register_checkpoint_conversion_mapping(
        OPENVLA_TYPE,
        [WeightRenaming(source_patterns=old, target_patterns=new) for old, new in renamed.items()],
        overwrite=True,
    )
