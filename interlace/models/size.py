"""Sizes of a model, known before its weights are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Sizes that memory is reckoned from."""

    num_parameters: int
    """Tied ones once."""
    weight_bytes: int
    kv_bytes_per_token: int
    """Keys and values of one token in all layers, where every layer attends to the whole context; else a bound."""
    logit_bytes_per_token: int
    """One row of float32 logits; training holds one for each response token of a micro-batch."""
    layer_bytes_per_token: int
    """Bytes that one layer keeps of a token for its backward, about."""
    pair_bytes: int
    """Bytes that a layer of experts keeps of a token for each of its experts, part of these; 0 of a model without."""
    pairs_per_token: int
    """Experts that each token has in a layer."""
    hidden_bytes_per_token: int
    """Bytes of a token that pass from layer to layer: all that is kept of a layer that is recomputed."""
    num_layers: int
    context: int | None
    """Tokens that the positions reach, by context_length."""

    @property
    def trained_bytes(self) -> int:
        """Returns the bytes of the weights where they are trained: in float32, whatever they were loaded in."""
        return FLOAT_BYTES * self.num_parameters

    def activation_bytes(self, tokens: int, *, recomputed: bool) -> int:
        """Returns the bytes, about, that a forward keeps for its backward; in float32, so on a GPU a bound.

        recomputed: by gradient checkpointing, a layer at a time.
        """
        around = 3 * self.hidden_bytes_per_token  # of the last norm and the head's input
        if not recomputed:
            return tokens * (around + self.num_layers * self.layer_bytes_per_token)
        return tokens * (around + self.num_layers * self.hidden_bytes_per_token + self.layer_bytes_per_token)

    def exchange_bytes(self, tokens: int, ranks: int, *, recomputed: bool) -> int:
        """Returns the bytes, about, that tokens take on a rank beside its own activations where experts are dealt out.

        tokens: of one rank's micro-batch. Each layer keeps what its experts gave back. One layer's pairs of tokens and
        experts may all come to this rank, there and on their way; all layers' would be no bound but a wrong guess.
        """
        pairs, kept = tokens * self.pairs_per_token, 1 if recomputed else self.num_layers
        on_way = 2 * ranks * self.hidden_bytes_per_token
        return pairs * (kept * self.hidden_bytes_per_token + on_way + (ranks - 1) * self.pair_bytes)


def model_size(model: "PreTrainedModel") -> ModelSize:
    """Its weights are not read, and may be on the meta device."""
    text = model.config.get_text_config()
    num_heads = int(getattr(text, "num_attention_heads", None) or 1)
    num_kv_heads = int(getattr(text, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    mlp_size = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    expert_size = int(getattr(text, "moe_intermediate_size", None) or mlp_size)
    num_pairs = int(getattr(text, "num_experts_per_tok", None) or 0)
    # Counted in the graph of an expert: 3 rows of the hidden size, 4 of its own.
    pair_bytes = FLOAT_BYTES * (3 * int(text.hidden_size) + 4 * expert_size) if num_pairs else 0
    return ModelSize(
        num_parameters=model.num_parameters(),
        weight_bytes=model.num_parameters() * model.dtype.itemsize,
        kv_bytes_per_token=2 * int(text.num_hidden_layers) * num_kv_heads * head_dim * model.dtype.itemsize,
        logit_bytes_per_token=FLOAT_BYTES * int(text.vocab_size),
        # Counted in the graph of a decoder layer with a gated MLP: 11 rows of the hidden size, 4 of the MLP's.
        layer_bytes_per_token=FLOAT_BYTES * 11 * text.hidden_size
        + (num_pairs * pair_bytes or FLOAT_BYTES * 4 * mlp_size),
        pair_bytes=pair_bytes,
        pairs_per_token=num_pairs,
        hidden_bytes_per_token=FLOAT_BYTES * int(text.hidden_size),
        num_layers=int(text.num_hidden_layers),
        context=context_length(model.config),
    )


def context_length(config: "PretrainedConfig") -> int | None:
    """Returns the tokens that the model's positions reach; None where the configuration does not say.

    For longrope (arXiv 2402.13753), the tokens that its short factors reach: a longer sequence turns all that one
    forward computes by the long ones: log-probs would depend on the batch neighbours, and on when a sequence grew.
    """
    text = config.get_text_config()
    reach: int | None = getattr(text, "max_position_embeddings", None)
    rotation: Mapping[str, object] = getattr(text, "rope_parameters", None) or {}
    # One for all layers, or one for each of their types.
    rotations = [rotation, *(part for part in rotation.values() if isinstance(part, Mapping))]
    short = [int(part["original_max_position_embeddings"]) for part in rotations if part.get("rope_type") == "longrope"]
    return min([*short, *([] if reach is None else [reach])], default=None)
