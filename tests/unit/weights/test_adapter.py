"""An adapter that travels alone: the bytes are its own, and what is served is what the merged model serves."""

from pathlib import Path

import pytest
import torch

from interlace.algorithms import create_algorithm
from interlace.core.errors import UserError
from interlace.core.types import SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train import Adapter, LoraConfig, OptimizerConfig, TrainConfig, TrainEngine
from interlace.weights.config import WeightsConfig
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Route, WeightRef
from interlace.weights.writer import WeightWriter
from tests.unit.engines.train.models import ragged_samples, tiny_model

pytest.importorskip("peft")
LORA = LoraConfig(rank=2, target_modules=("q_proj", "down_proj"))


def trained(kind: str, config: LoraConfig, dtype: torch.dtype = torch.float32) -> TrainEngine:
    model = tiny_model(kind).to(dtype)
    engine = TrainEngine(
        model,
        loss=create_algorithm("grpo", {}).loss,
        optimizer=OptimizerConfig(lr=1e-2),
        config=TrainConfig(served_dtype="bfloat16" if dtype == torch.bfloat16 else "float32"),
        adapter=Adapter(model, config, seed=0),
    )
    return engine


def step(engine: TrainEngine, number: int) -> None:
    engine.accumulate(ragged_samples(6, number))
    engine.optimizer_step()


def serving(kind: str, dtype: torch.dtype = torch.float32) -> NativeEngine:
    return NativeEngine(tiny_model(kind).to(dtype), config=NativeConfig(max_running=4, max_tokens=512))


def take_in(engine: NativeEngine, reader: WeightReader, ref: WeightRef) -> None:
    with reader.open(ref) as read:
        engine.update_weights(read, ref.version, "recompute", frozen=read.frozen, adapters=ref.adapters)


@pytest.mark.parametrize(("kind", "config"), [("qwen2", LORA), ("gpt2", LoraConfig(rank=2))])
@pytest.mark.parametrize("transport", ["alias", "shared_memory", "gloo", "folder"])
def test_an_engine_samples_as_with_merged_weights(
    tmp_path: Path, kind: str, config: LoraConfig, transport: str
) -> None:
    engine = trained(kind, config)
    settings = {"transport": transport, "folder": str(tmp_path)}
    writers = [
        WeightWriter(Route(transport=transport, config=WeightsConfig.parse({**settings, "adapter": adapter})))
        for adapter in ("merged", "alone")
    ]
    engines, readers = [serving(kind), serving(kind)], [WeightReader(), WeightReader()]
    alone = engines[1].memory().weights
    prompts = [[3, 4, 5], [7, 8, 9, 10]]
    for version in range(3):
        step(engine, version)
        refs = [
            WeightRef(version=version, parts=(engine.write_weights(writer, version, copy=True),)) for writer in writers
        ]
        assert refs[1].num_bytes == sum(tensor.nbytes for tensor in engine._adapter.tensors.values())  # type: ignore[union-attr]
        assert refs[1].num_bytes < refs[0].num_bytes / 4
        found = []
        for served, reader, ref in zip(engines, readers, refs, strict=True):
            take_in(served, reader, ref)
            found.append(served.generate(prompts, SamplingParams(max_new_tokens=12)))
        for merged, added in zip(*found, strict=True):
            assert merged.token_ids == added.token_ids and merged.logprobs == added.logprobs
    adapted = sum(shard.num_bytes for shard in refs[1].adapters[0].shards)
    assert engines[1].memory().weights == alone + adapted, "layers with an adapter are held twice, and counted so"
    for end in (*readers, *writers):
        end.close()


def test_bfloat16_weights_are_the_trainers_to_the_bit() -> None:
    engine, served = trained("qwen2", LORA, torch.bfloat16), serving("qwen2", torch.bfloat16)
    step(engine, 0)
    writer = WeightWriter(Route(transport="alias", config=WeightsConfig(adapter="alone")))
    take_in(served, WeightReader(), WeightRef(version=1, parts=(engine.write_weights(writer, 1, copy=True),)))
    state = served._model.state_dict()
    for name, tensor in engine.weights().items():
        assert torch.equal(state[name], tensor), name


def test_another_base_is_refused_and_the_old_weights_serve() -> None:
    engine, served = trained("qwen2", LORA), serving("qwen2")
    step(engine, 0)
    writer = WeightWriter(Route(transport="alias", config=WeightsConfig(adapter="alone")))
    ref = WeightRef(version=1, parts=(engine.write_weights(writer, 1, copy=True),))
    with torch.no_grad():
        served._model.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    before = {name: tensor.clone() for name, tensor in served._model.state_dict().items()}
    with pytest.raises(UserError, match="another than the one that the adapter was trained on"):
        take_in(served, WeightReader(), ref)
    assert served.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in served._model.state_dict().items())
