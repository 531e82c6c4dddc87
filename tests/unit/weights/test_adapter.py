"""A published adapter contains only its own bytes, and serves the same results as the merged model."""

from pathlib import Path

import pytest
import torch

from interlace.algorithms import create_algorithm
from interlace.core.errors import UserError
from interlace.core.types import Request, Response, SampleKey, SamplingParams
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
    state = served.model.state_dict()
    for name, tensor in engine.weights().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("kernels", [True, False], ids=["c++ decoder", "transformers"])
def test_sequences_end_under_the_adapter_that_they_began_with(kernels: bool) -> None:
    engine = trained("qwen2", LORA)
    config = NativeConfig(max_running=6, max_tokens=512, steps_per_schedule=1, compile_kernels=kernels)
    served, reader = NativeEngine(tiny_model("qwen2"), config=config), WeightReader()
    writer = WeightWriter(Route(transport="alias", config=WeightsConfig(adapter="alone")))
    params, weights, done = SamplingParams(max_new_tokens=24), {}, dict[str, Response]()
    base = served.memory().weights
    for version in range(3):  # two sequences begin under each, while those of the versions before run on
        step(engine, version)
        weights[version] = {name: tensor.detach().clone() for name, tensor in engine.weights().items()}
        ref = WeightRef(version=version, parts=(engine.write_weights(writer, version, copy=True),))
        with reader.open(ref) as read:
            served.update_weights(read, version, "own", adapters=ref.adapters)
        for number in (2 * version, 2 * version + 1):  # the same prompts under each: no prefix may be shared
            prompt = [3 + number % 2, *range(4, 40)]
            owner = SampleKey(number, 0)
            served.submit(Request(uid=str(number), owner=owner, prompt_ids=prompt, params=params))
        for _ in range(3):
            done |= {completion.request.id: completion for completion in served.step().finished}
    adapted = sum(shard.num_bytes for shard in ref.adapters[0].shards)
    assert served.memory().weights == base + 3 * adapted, "without an adapter, and two older ones beside the newest"
    while len(done) < 6:
        done |= {completion.request.id: completion for completion in served.step().finished}
    assert served.memory().weights == base + adapted, "the older ones went with their last sequences"
    for completion in done.values():
        version = completion.request.owner.gid // 2
        assert set(completion.versions) == {version}
        model = tiny_model("qwen2")
        model.load_state_dict(weights[version], strict=False)
        prompt = list(completion.request.prompt_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert torch.allclose(found, torch.tensor(completion.logprobs), atol=1e-5, rtol=0)


def test_whole_weights_are_not_held_side_by_side() -> None:
    served = serving("qwen2")
    with pytest.raises(UserError, match=r"weights\.adapter=alone"):
        served.update_weights(dict(served.model.state_dict()), 1, "own")


def test_another_base_is_refused_and_the_old_weights_serve() -> None:
    engine, served = trained("qwen2", LORA), serving("qwen2")
    step(engine, 0)
    writer = WeightWriter(Route(transport="alias", config=WeightsConfig(adapter="alone")))
    ref = WeightRef(version=1, parts=(engine.write_weights(writer, 1, copy=True),))
    with torch.no_grad():
        served.model.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    before = {name: tensor.clone() for name, tensor in served.model.state_dict().items()}
    with pytest.raises(UserError, match="another than the one that the adapter was trained on"):
        take_in(served, WeightReader(), ref)
    assert served.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in served.model.state_dict().items())


def test_an_adapter_of_other_layers_is_refused() -> None:
    """The layers that the second adapter leaves out kept the first one."""
    served = serving("qwen2")
    for version, config in enumerate((LORA, LoraConfig(rank=2, target_modules=("q_proj",)))):
        engine, writer = (
            trained("qwen2", config),
            WeightWriter(Route(transport="alias", config=WeightsConfig(adapter="alone"))),
        )
        ref = WeightRef(version=version, parts=(engine.write_weights(writer, version, copy=True),))
        if version == 0:
            take_in(served, WeightReader(), ref)
    with pytest.raises(UserError, match=r"other layers, such as 'model\.layers\.0\.mlp\.down_proj"):
        take_in(served, WeightReader(), ref)


def test_an_adapter_is_added_to_the_base_that_was_loaded_last(tmp_path: Path) -> None:
    writer, reader = WeightWriter(Route(transport="alias", config=WeightsConfig(adapter="alone"))), WeightReader()
    served, first = serving("qwen2"), trained("qwen2", LORA)
    step(first, 0)
    take_in(served, reader, WeightRef(version=1, parts=(first.write_weights(writer, 1, copy=True),)))
    other = tiny_model("qwen2")
    with torch.no_grad():
        other.get_parameter("model.layers.0.self_attn.q_proj.weight").mul_(2)
    other.save_pretrained(tmp_path)
    served.load(tmp_path, 2, "recompute")
    with pytest.raises(UserError, match="another than the one that the adapter was trained on"):
        take_in(served, reader, WeightRef(version=3, parts=(first.write_weights(writer, 3, copy=True),)))
    adapter = Adapter(other, LORA, seed=0)
    second = TrainEngine(
        other, loss=first._loss, optimizer=OptimizerConfig(lr=1e-2), config=TrainConfig(), adapter=adapter
    )
    step(second, 0)
    take_in(served, reader, WeightRef(version=4, parts=(second.write_weights(writer, 4, copy=True),)))
    for name, tensor in adapter.merge_weights().items():
        assert torch.allclose(served.model.state_dict()[name], tensor, atol=1e-6), name
