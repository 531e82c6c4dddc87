"""An export in another type keeps the tensors that transformers loads in float32."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from interlace.run.export import write_cast_model


def test_the_bias_that_chooses_experts_is_not_rounded(tmp_path: Path) -> None:
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    bias = model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    given = torch.tensor([8.01, 8.02, 8.03, 8.04])
    bias.copy_(given)
    write_cast_model(model, None, "bfloat16", tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias"), given)
