"""Picture encoders of SmolVLA and pi0: transformers' image towers and projectors, with the folders' weight names."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import SmolVLMConfig

PALIGEMMA_PATCH = 14


class PicturesEncoder(nn.Module):
    """Encodes pictures [B, 3, side, side] as tokens [B, T, H]. Its weights are loaded later."""

    def published(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns weights by this module's names. weights: the reading model's, by their published names."""
        return weights


class SmolVLMEncoder(PicturesEncoder):
    """SmolVLA's encoder."""

    def __init__(self, config: "SmolVLMConfig") -> None:
        super().__init__()
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionTransformer

        eye: Any = config.vision_config  # transformers' stub allows more types than occur
        self.vision_model = SmolVLMVisionTransformer(eye)
        self.connector = SmolVLMConnector(config)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.connector(self.vision_model(pixel_values=pictures).last_hidden_state)


class PaliGemmaEncoder(PicturesEncoder):
    """Encoder of pi0 and pi0.5, with the sizes of a folder's weights."""

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

    def published(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            name.replace("vision_tower.vision_model.", "vision_tower.").removeprefix("multi_modal_projector."): weight
            for name, weight in weights.items()
        }
