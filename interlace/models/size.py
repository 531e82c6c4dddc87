"""What a model weighs, known before its weights are read."""

from dataclasses import dataclass

from interlace.models.config import ModelConfig
from interlace.models.loading import empty_model


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Sizes that memory is reckoned from."""

    num_parameters: int
    """Tied ones once."""
    weight_bytes: int
    kv_bytes_per_token: int
    """Keys and values of one token in all layers, where every layer attends to the whole context; else a bound."""
    context: int | None
    """Tokens that the model's positions reach; None where its configuration does not say."""


def model_size(config: ModelConfig) -> ModelSize:
    """Raises UserError as check_model."""
    model = empty_model(config)
    text = model.config.get_text_config()
    num_heads = int(getattr(text, "num_attention_heads", None) or 1)
    num_kv_heads = int(getattr(text, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    return ModelSize(
        num_parameters=model.num_parameters(),
        weight_bytes=model.num_parameters() * model.dtype.itemsize,
        kv_bytes_per_token=2 * int(text.num_hidden_layers) * num_kv_heads * head_dim * model.dtype.itemsize,
        context=getattr(text, "max_position_embeddings", None),
    )
