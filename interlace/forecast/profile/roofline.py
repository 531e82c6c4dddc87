"""Builds the roofline profile of a recipe from its model's shape and a device's data sheet."""

from interlace.forecast.costs.roofline import ModelShape, roofline_profile
from interlace.forecast.profile.samples import sizes_of
from interlace.forecast.profile.types import Profile
from interlace.models.loading import empty_model
from interlace.models.size import count_kv_heads, list_layers, model_size
from interlace.run.recipe.config import Recipe

BF16_BYTES = 2


def shape_of(recipe: Recipe) -> ModelShape:
    """Returns the properties of a recipe's model that determine its costs, without reading weights."""
    model = empty_model(recipe.model)
    size = model_size(model)
    return ModelShape(
        name=recipe.model.path,
        num_parameters=size.num_parameters,
        num_layers=size.num_layers,
        num_kv_heads=min(map(count_kv_heads, list_layers(model.config))),
        kv_bytes_per_token=size.kv_bytes_per_token * BF16_BYTES // model.dtype.itemsize,
        logit_bytes_per_token=size.logit_bytes_per_token,
        hidden_bytes_per_token=size.hidden_bytes_per_token // 2,
        expert_parameters=size.expert_parameters,
        num_experts=size.num_experts,
        experts_per_token=size.pairs_per_token,
    )


def roofline_of(recipe: Recipe, device: str) -> Profile:
    """Returns the estimated costs of a recipe's workers on a device kind that need not be present.

    Raises UserError for an unknown kind.
    """
    return roofline_profile(device, shape_of(recipe), sizes_of(recipe), micro_batch_tokens=recipe.tokens_per_microbatch)
