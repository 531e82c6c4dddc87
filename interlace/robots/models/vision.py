"""Picture encoders of SmolVLA and pi0: transformers' image towers and projectors, with the folders' weight names."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from interlace.core.errors import UserError

if TYPE_CHECKING:
    from transformers import SmolVLMConfig

PALIGEMMA_PATCH = 14


class PicturesEncoder(nn.Module):
    """Encodes pictures [B, 3, side, side] as tokens [B, T, H]."""

    @abstractmethod
    def published(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this module's weights. weights: the reading model's weights, by their published names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmolVLMSizes:
    """Sizes of SmolVLA's language model that the shapes of its weights do not determine."""

    config: "SmolVLMConfig"
    heads: int
    epsilon: float


def smolvlm_sizes(folder: Path | None) -> SmolVLMSizes:
    """Reads the configuration of SmolVLA's language model."""
    from transformers import SmolVLMConfig

    if folder is None:
        raise UserError("SmolVLA needs the folder of its language model's configuration (vlm_model_name).")
    config = SmolVLMConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    text: Any = config.text_config
    return SmolVLMSizes(config=config, heads=text.num_attention_heads, epsilon=text.rms_norm_eps)


class _SmolVLMEncoder(PicturesEncoder):
    def __init__(self, config: "SmolVLMConfig") -> None:
        super().__init__()
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionTransformer

        eye: Any = config.vision_config  # transformers' stub allows more types than occur
        self.vision_model = SmolVLMVisionTransformer(eye)
        self.connector = SmolVLMConnector(config)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.connector(self.vision_model(pixel_values=pictures).last_hidden_state)

    def published(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight for name, weight in weights.items() if name.startswith(("vision_model.", "connector."))}


class _PaliGemmaEncoder(PicturesEncoder):
    def __init__(self, weights: Mapping[str, Tensor], heads: int) -> None:
        super().__init__()
        from transformers import SiglipVisionConfig, SiglipVisionModel

        own = self.published(weights)
        places, width = own["vision_tower.embeddings.position_embedding.weight"].shape
        layers = {name.split(".")[3] for name in own if name.startswith("vision_tower.encoder.layers.")}
        config = SiglipVisionConfig(
            hidden_size=width,
            intermediate_size=len(own["vision_tower.encoder.layers.0.mlp.fc1.bias"]),
            num_hidden_layers=len(layers),
            num_attention_heads=heads,
            image_size=round(places**0.5) * PALIGEMMA_PATCH,
            patch_size=PALIGEMMA_PATCH,
            vision_use_head=False,
        )
        self.vision_tower = SiglipVisionModel(config)
        self.linear = nn.Linear(*own["linear.weight"].shape[::-1])

    def forward(self, pictures: Tensor) -> Tensor:
        return self.linear(self.vision_tower(pixel_values=pictures).last_hidden_state)

    def published(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        renamed = {name.replace("vision_tower.vision_model.", "vision_tower."): weights[name] for name in weights}
        return {
            name.removeprefix("multi_modal_projector."): weight
            for name, weight in renamed.items()
            if name.startswith(("vision_tower.", "multi_modal_projector."))
        }


def smolvlm_encoder(sizes: SmolVLMSizes) -> PicturesEncoder:
    """Builds SmolVLA's encoder. Its weights are loaded later."""
    return _SmolVLMEncoder(sizes.config)


def paligemma_encoder(weights: Mapping[str, Tensor], heads: int) -> PicturesEncoder:
    """Builds pi0's encoder with the sizes of a folder's weights, which are loaded later."""
    return _PaliGemmaEncoder(weights, heads)
