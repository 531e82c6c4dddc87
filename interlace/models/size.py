"""Sizes of a model, known before its weights are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Sizes for the estimate of memory use."""

    num_parameters: int
    """Parameters; tied ones count once."""
    weight_bytes: int
    kv_bytes_per_token: int
    """Keys and values of one token in all layers, if every layer attends to the whole context; otherwise an upper
    bound."""
    latent_kv_bytes_per_token: int
    """The same for an engine that caches one vector per token from which the heads' keys and values are computed (MLA,
    arXiv 2405.04434), such as vLLM; kv_bytes_per_token for other models."""
    num_kv_parts: int
    """Most ranks among which keys and values can be split; further ranks, and all of MLA, hold copies."""
    logit_bytes_per_token: int
    """One row of float32 logits; training keeps one for each response token of a micro-batch."""
    layer_bytes_per_token: int
    """Estimate of the bytes that one layer keeps of a token for its backward pass."""
    pair_bytes: int
    """Bytes that a layer of experts keeps per pair of token and expert, included in layer_bytes_per_token; 0 for a
    model without experts."""
    pairs_per_token: int
    """Experts per token in a layer."""
    hidden_bytes_per_token: int
    """Bytes of a token that pass from layer to layer; gradient checkpointing keeps only these."""
    num_layers: int
    expert_parameters: int
    """Parameters of all routed experts, included in num_parameters."""
    num_experts: int
    """Routed experts of a layer; 0 for a model without experts."""
    context: int | None
    """Longest sequence, in tokens, by context_length. If None, no limit is known."""

    @property
    def trained_bytes(self) -> int:
        """Returns the bytes of the trained weights, which are float32 regardless of the loaded type."""
        return FLOAT_BYTES * self.num_parameters

    def activation_bytes(self, tokens: int, *, recomputed: bool) -> int:
        """Estimates the bytes that a forward pass keeps for its backward pass, in float32 (an upper bound on a GPU).

        recomputed: gradient checkpointing, one layer at a time.
        """
        around = 3 * self.hidden_bytes_per_token  # For the last norm and the head's input.
        if not recomputed:
            return tokens * (around + self.num_layers * self.layer_bytes_per_token)
        return tokens * (around + self.num_layers * self.hidden_bytes_per_token + self.layer_bytes_per_token)

    def exchange_bytes(self, tokens: int, ranks: int, *, recomputed: bool) -> int:
        """Estimates the bytes of expert parallelism on a rank, in addition to its activations.

        tokens: of one rank's micro-batch. Each layer keeps the experts' outputs. In one layer, all pairs of tokens and
        experts may come to this rank, including their copies in transit; the same assumption for all layers would be
        far too high.
        """
        pairs, kept = tokens * self.pairs_per_token, 1 if recomputed else self.num_layers
        on_way = 2 * ranks * self.hidden_bytes_per_token
        return pairs * (kept * self.hidden_bytes_per_token + on_way + (ranks - 1) * self.pair_bytes)


def model_size(model: "PreTrainedModel") -> ModelSize:
    """Computes the sizes of a model without reading its weights, which may be on the meta device."""
    text = model.config.get_text_config()
    layers = list_layers(model.config)
    mlp_size = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    expert_size = int(getattr(text, "moe_intermediate_size", None) or mlp_size)
    num_pairs = int(getattr(text, "num_experts_per_tok", None) or 0)
    # Counted in the autograd graph of an expert: 3 rows of the hidden size and 4 of the expert's inner size.
    pair_bytes = FLOAT_BYTES * (3 * int(text.hidden_size) + 4 * expert_size) if num_pairs else 0
    return ModelSize(
        num_parameters=model.num_parameters(),
        weight_bytes=model.num_parameters() * model.dtype.itemsize,
        kv_bytes_per_token=sum(map(_count_kv_numbers, layers)) * model.dtype.itemsize,
        latent_kv_bytes_per_token=sum(map(_count_latent_numbers, layers)) * model.dtype.itemsize,
        num_kv_parts=min(1 if getattr(layer, "kv_lora_rank", None) else count_kv_heads(layer) for layer in layers),
        logit_bytes_per_token=FLOAT_BYTES * int(text.vocab_size),
        # Counted in the autograd graph of a decoder layer with a gated MLP: 11 rows of the hidden size, 4 of the MLP's.
        layer_bytes_per_token=FLOAT_BYTES * 11 * text.hidden_size
        + (num_pairs * pair_bytes or FLOAT_BYTES * 4 * mlp_size),
        pair_bytes=pair_bytes,
        pairs_per_token=num_pairs,
        hidden_bytes_per_token=FLOAT_BYTES * int(text.hidden_size),
        num_layers=int(text.num_hidden_layers),
        expert_parameters=sum(each.numel() for name, each in model.named_parameters() if ".experts." in name),
        num_experts=_count_experts(text) if num_pairs else 0,
        context=context_length(model.config),
    )


def list_layers(config: "PretrainedConfig") -> "Sequence[PretrainedConfig]":
    """Returns the configuration of each layer. In some models, such as Gemma 4, layers differ in their heads."""
    return [*config.get_text_config().per_layer_config]


def count_kv_heads(layer: "PretrainedConfig") -> int:
    """Returns the number of key and value heads of a layer. layer: the layer's configuration."""
    return int(getattr(layer, "num_key_value_heads", None) or _count_heads(layer))


def size_of_head(layer: "PretrainedConfig") -> int:
    """Returns the size of a key of a layer, in numbers. layer: the layer's configuration."""
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // _count_heads(layer))


def _count_heads(layer: "PretrainedConfig") -> int:
    return int(getattr(layer, "num_attention_heads", None) or 1)


def _count_kv_numbers(layer: "PretrainedConfig") -> int:
    """Counts the numbers of a token's keys and values in a layer."""
    if getattr(layer, "kv_lora_rank", None):
        return _count_heads(layer) * int(layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim)
    return 2 * count_kv_heads(layer) * size_of_head(layer)


def _count_latent_numbers(layer: "PretrainedConfig") -> int:
    """Counts the numbers of a token in a layer of an engine that caches latent vectors."""
    rank = getattr(layer, "kv_lora_rank", None)
    return int(rank + layer.qk_rope_head_dim) if rank else _count_kv_numbers(layer)


def _count_experts(text: "PretrainedConfig") -> int:
    """Returns the number of routed experts of a layer; families of models have different names for it."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(count) for name in names if (count := getattr(text, name, None))), 0)


def context_length(config: "PretrainedConfig") -> int | None:
    """Returns the longest sequence that the model's positions allow, in tokens; None if the configuration has no limit.

    For longrope (arXiv 2402.13753), returns the reach of its short factors. A longer sequence would switch all
    sequences of the same forward pass to the long factors: log-probs would depend on the other sequences of the batch,
    and on the time at which a sequence grew.
    """
    text = config.get_text_config()
    reach: int | None = getattr(text, "max_position_embeddings", None)
    rotation: Mapping[str, object] = getattr(text, "rope_parameters", None) or {}
    # One mapping for all layers, or one for each type of layer.
    rotations = [rotation, *(part for part in rotation.values() if isinstance(part, Mapping))]
    short = [int(part["original_max_position_embeddings"]) for part in rotations if part.get("rope_type") == "longrope"]
    return min([*short, *([] if reach is None else [reach])], default=None)
