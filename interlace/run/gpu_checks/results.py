"""Results of GPU checks, and the models that the checks use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuResult:
    """One row of the table."""

    name: str
    """Measured property, such as `decode, batch 32`."""
    value: float
    unit: str
    limit: float | None = None
    """Physical limit of the value, in the same unit; None if no limit applies."""
    passed: bool = True
    """False if the value contradicts a promise of the system. A slow result does not fail."""
    note: str = ""

    @property
    def share(self) -> float | None:
        """Returns value / limit; None without a limit."""
        return self.value / self.limit if self.limit else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """Measured speed of the GPU, the limit of the other checks."""

    bytes_per_s: float
    """Memory traffic of a large copy, bytes read plus bytes written."""
    flops_per_s: float
    """Dense bfloat16 products of 8192 x 8192 matrices."""


def build_llama(*, hidden: int, layers: int, dtype: str, device: str, seed: int = 0) -> PreTrainedModel:
    """Builds a Llama with random weights. hidden is a multiple of 128; dtype is the name of a torch dtype."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = hidden // (32 if hidden < 512 else 64)
    config = LlamaConfig(
        vocab_size=32_000 if hidden >= 512 else 128,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    return model.to(getattr(torch, dtype)).eval()


def count_parameters(model: PreTrainedModel) -> int:
    """Counts the parameters of the layers and the output head; the input embedding makes no products."""
    embedding = model.get_input_embeddings().weight
    return sum(parameter.numel() for parameter in model.parameters() if parameter is not embedding)
