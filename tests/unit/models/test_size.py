"""The memory of a model is known before its weights are read."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from interlace.core.errors import UserError
from interlace.core.types import Prompt, Sample, SampleKey, SamplingParams, Segment
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train import ActorConfig, LogprobEngine, OptimizerConfig, TrainConfig, TrainEngine, sft_loss
from interlace.models.config import ModelConfig
from interlace.models.expert_parallel import share_experts
from interlace.models.loading import empty_model, load_model
from interlace.models.size import context_length, model_size
from interlace.weights.shards import local_part
from tests.unit.engines.train.models import tiny_model

TINY = ModelConfig(path="tiny:micro")


@contextmanager
def kept_for_the_backward(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Bytes by storage, the model's own weights left out."""
    own = {local_part(parameter.detach()).untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize("recomputed", [False, True])
def test_activations_are_about_what_a_forward_keeps(recomputed: bool) -> None:
    size, model = model_size(empty_model(TINY)), load_model(TINY).model
    engine = TrainEngine(
        model,
        loss=sft_loss,
        optimizer=OptimizerConfig(),
        config=TrainConfig(actor=ActorConfig(gradient_checkpointing=recomputed)),
    )
    ids = np.arange(1, 33, dtype=np.int32)
    prompt = Prompt(uid="0", token_ids=ids[:1], text="", answer="")
    samples = [Sample(key=SampleKey(0, i), prompt=prompt, segments=(Segment(token_ids=ids),)) for i in range(8)]
    with kept_for_the_backward(model) as kept:
        outputs = engine.packed.outputs(engine._collate(samples, masks=[None] * len(samples)))
    assert outputs.nbytes == 8 * 32 * size.logit_bytes_per_token
    expected = size.activation_bytes(8 * 32, recomputed=recomputed)
    if recomputed:  # one layer's are made anew in the backward
        expected -= 8 * 32 * size.layer_bytes_per_token
    assert sum(kept.values()) == pytest.approx(expected, rel=0.15)


def expert_model(num_layers: int) -> PreTrainedModel:
    wide = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    experts = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "max_position_embeddings": 512}
    return tiny_model("qwen3_moe", num_hidden_layers=num_layers, **wide, **experts)


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """One rank that deals experts out to itself."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield DeviceMesh("cpu", [0])
    distributed.destroy_process_group()


def test_experts_keep_rows_of_their_own_and_an_exchange_keeps_what_came_back(alone: DeviceMesh) -> None:
    ids = torch.arange(512)[None] % 20

    def kept_by_a_layer(experts: int, *, dealt: bool) -> int:
        """Bytes, by the difference of two layers and one."""
        found = []
        for num_layers in (1, 2):
            model = expert_model(num_layers)
            for layer in model.model.layers:
                layer.mlp.gate.top_k = experts
            if dealt:
                share_experts(model, alone)
            with kept_for_the_backward(model) as kept:
                model(ids, use_cache=False)
            found.append(sum(kept.values()))
        return found[1] - found[0]

    size = model_size(expert_model(1))
    assert size.pairs_per_token == 2
    of_a_pair = (kept_by_a_layer(2, dealt=False) - kept_by_a_layer(1, dealt=False)) / ids.numel()
    assert 0.8 * size.pair_bytes < of_a_pair < size.pair_bytes
    exchanged = kept_by_a_layer(2, dealt=True) - kept_by_a_layer(2, dealt=False)
    more = [size.exchange_bytes(ids.numel(), 1, recomputed=recomputed) for recomputed in (False, True)]
    assert more[0] == more[1], "of one layer"
    assert 0 < exchanged <= more[0]


def test_the_context_ends_where_one_sequence_would_change_its_company() -> None:
    """With longrope, one token beyond the short factors' reach moves every log-prob of the forward."""
    reach, rotation = 16, {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": reach}

    def model() -> PreTrainedModel:
        return tiny_model("llama", rope_parameters={**rotation, **factors})

    assert context_length(model().config) == reach < model().config.max_position_embeddings
    assert context_length(tiny_model("llama").config) == 64
    engine = LogprobEngine(model(), config=TrainConfig())
    rollout = NativeEngine(model(), config=NativeConfig(max_tokens=256))
    short, full, beyond = (sample_of(length) for length in (4, reach, reach + 1))
    alone, beside, beside_longer = (engine.logprobs([short, *others])[0] for others in ([], [full], [beyond]))
    assert beside == pytest.approx(alone, abs=1e-5)
    assert beside_longer != pytest.approx(alone, abs=1e-2)
    with pytest.raises(UserError, match=f"context holds {reach}"):
        rollout.generate([range(reach)], SamplingParams(max_new_tokens=1))


def sample_of(length: int) -> Sample:
    """Prompt and response of so many tokens, of which the last is only predicted."""
    tokens = np.arange(3, 4 + length, dtype=np.int32)
    return Sample(
        key=SampleKey(0, length),
        prompt=Prompt(uid="", token_ids=tokens[:2], text="", answer=""),
        segments=(Segment(token_ids=tokens[2:]),),
    )


LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "first_k_dense_replace": 2,
}  # fmt: skip
MIXED = {
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "own"), [("deepseek_v3", LATENT), ("gemma4_text", MIXED)])
def test_keys_and_values_take_what_is_known_before(kind: str, own: dict[str, object]) -> None:
    """Of a model that computes all heads from one vector, and of a model whose layers have heads of several sizes."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, intermediate_size=32, max_position_embeddings=64, **sizes, **own)
    model = AutoModelForCausalLM.from_config(config).eval()
    known, spare = model_size(model), 16
    engine = NativeEngine(model, config=NativeConfig(max_running=2, max_tokens=64))
    assert "plain" not in engine.report().attention
    assert engine.memory().kv_cache == (64 + spare) * known.kv_bytes_per_token
