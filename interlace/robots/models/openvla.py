"""Policies in the layout of OpenVLA's folders (arXiv 2406.09246): image towers, a projector, a Llama body.

A folder is read through its configuration, the numbers of its image processor and the names of its weights; its code is
not executed. A checkpoint of a run has one flat configuration, which includes the processor's numbers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification, LlamaForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaForTokenClassification

from interlace.core.errors import UserError
from interlace.models.config import GAUSSIAN, OPENVLA_TYPE
from interlace.models.inputs import IMAGE, STATE, WRIST
from interlace.robots.models import openvla_oft as oft
from interlace.robots.models.openvla_config import PROCESSOR, OpenVLAConfig, TowerShape
from interlace.robots.models.vla import EmbedsArrays

CAMERAS = (IMAGE, WRIST)


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _Heads(nn.Module):  # not named Attention, because transformers would then look for its attention interface
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
    """Vision transformer up to its second-to-last layer."""

    def __init__(self, shape: TowerShape, side: int) -> None:
        super().__init__()
        self._num_prefix = shape.classes + shape.registers  # tokens before the patches
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, shape.width, shape.patch, stride=shape.patch)})
        self.pos_embed = nn.Parameter(torch.zeros(1, (side // shape.patch) ** 2, shape.width))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width)) if shape.classes else None
        self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, shape.width)) if shape.registers else None
        self.blocks = nn.ModuleList([_Block(shape) for _ in range(shape.depth)])
        self.blocks[-1].requires_grad_(False)  # the last layer is not used; it keeps the folder's weights

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
    """Embeds images: concatenates the towers' features, then applies two layers for one tower, three for two.

    OpenVLA-OFT's embeds several images one after another, then the robot's state.
    """

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
        self._cameras = CAMERAS[: config.num_images]
        self.proprio = oft.ProprioProjector(config.state_size, hidden) if config.state_size else None

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Computes [N, vectors, hidden] from {"image": [N, side, side, 3]}, and "wrist_image" and "state" [N, F]."""
        found = [self._embed_pictures(inputs[camera]) for camera in self._cameras]
        if self.proprio is not None:
            found.append(self.proprio(inputs[STATE]))
        return torch.cat(found, 1)

    def _embed_pictures(self, pictures: Tensor) -> Tensor:
        images = pictures.to(self.fc1.weight.dtype).permute(0, 3, 1, 2) / 255
        found = []
        for place, tower in enumerate(self.vision_backbone.children()):
            mean, std = (images.new_tensor(numbers[place])[:, None, None] for numbers in (self._means, self._stds))
            found.append(tower((images - mean) / std))
        x = self.fc2(F.gelu(self.fc1(torch.cat(found, -1))))
        return x if self.fc3 is None else self.fc3(F.gelu(x))


class OpenVLAModel(EmbedsArrays, oft.BidirectionalLlama):  # type: ignore[misc]  # transformers' forward
    """Body whose forward accepts named arrays in addition to the tokens."""

    config_class = OpenVLAConfig

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        self.projector = OpenVLAProjector(config)
        if config.parallel_decoding:
            self.embed_tokens.padding_idx = config.zero_token_id  # no gradient, so its embedding stays 0
        self.post_init()


class OpenVLAForCausalLM(LlamaForCausalLM):
    """Policy with a language-model head or an action head."""

    config_class = OpenVLAConfig

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        self.model = OpenVLAModel(config)
        self.action_head = None
        if config.action_head == GAUSSIAN:
            self.action_head = oft.RegressionHead(
                config.hidden_size, config.action_size, config.head_width, config.action_log_std
            )
        source = str(config.name_or_path or "")
        if config.parallel_decoding and source and oft.find_parts(Path(source)):
            self._keys_to_ignore_on_load_missing = [r"^action_head\.", r"^model\.projector\.proprio\."]
        self.post_init()

    def forward(  # house: the signature is transformers'
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **others: Any
    ) -> CausalLMOutputWithPast:
        """Computes logits; with an action head, mean and log standard deviation at the queries of an answer."""
        if self.action_head is None:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **others)
        others.pop("logits_to_keep", None)
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **others).last_hidden_state
        count, length = hidden.shape[:2]
        lengths = hidden.new_full((count,), length).long() if attention_mask is None else attention_mask.sum(1)
        num_queries = len(self.config.query_token_ids or ())
        return CausalLMOutputWithPast(logits=oft.spread_over_queries(self.action_head, hidden, lengths, num_queries))

    @classmethod
    def from_pretrained(  # house: the signature is transformers'
        cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any
    ) -> Any:
        """Loads a folder, including the parts of OpenVLA-OFT in separate files."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        source = pretrained_model_name_or_path
        if model.config.parallel_decoding and source is not None:
            model._load_parts(oft.find_parts(Path(source)))
        return loaded

    @torch.no_grad()
    def _load_parts(self, parts: Mapping[str, Path]) -> None:
        """Loads the modules of OpenVLA-OFT's parts from their files."""
        modules = {oft.HEAD: self.action_head, oft.PROPRIO: self.model.projector.proprio}
        for part, file in parts.items():
            weights = oft.load_part(file)
            own = dict(modules[part].named_parameters())
            if absent := [name for name in own if name not in weights and name != "log_std"]:
                raise UserError(f"{file.name} has no {absent[0]}: it is not a whole {part} of OpenVLA-OFT.")
            for name in own.keys() & weights.keys():
                own[name].copy_(weights[name])
        if self.action_head is not None and oft.HEAD in parts:
            self.action_head.log_std.fill_(self.config.action_log_std)
        self.get_input_embeddings().get_parameter("weight")[self.config.zero_token_id].zero_()


class OpenVLAForTokenClassification(LlamaForTokenClassification):
    """Critic: one value per token."""

    config_class = OpenVLAConfig

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        self.model = OpenVLAModel(config)
        self.post_init()


def register_openvla() -> None:
    """Registers the layout with transformers' Auto classes, and the names of its weights."""
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
