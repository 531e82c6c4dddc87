"""Weights change under running sequences: every token has its version, and a log-prob of this version."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from interlace.core.errors import UserError
from interlace.core.types import NO_GROUP, Request, Response, SampleKey
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams
from interlace.engines.rollout.config import KVKind
from interlace.engines.rollout.protocol import SwitchMode, UpdateMode
from tests.support.relocation import poisoned

ModelMaker = Callable[..., PreTrainedModel]
STEPWISE = NativeConfig(steps_per_schedule=1)
PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3], [7, 8, 9, 10, 11, 12]]


def submit_all(engine: NativeEngine, max_new_tokens: int = 24) -> None:
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_new_tokens=max_new_tokens)
        engine.submit(Request(uid="p", owner=SampleKey(NO_GROUP, index), prompt_ids=prompt, params=params))


def drain(engine: NativeEngine, into: dict[int, Response], steps: int = 1000) -> None:
    for _ in range(steps):
        output = engine.step()
        into |= {completion.request.owner.index: completion for completion in output.finished}
        if not output.num_running and not output.num_waiting:
            return


def teacher_forced(model: PreTrainedModel, prompt: list[int], tokens: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def run_through_updates(engine: NativeEngine, models: list[PreTrainedModel], mode: UpdateMode) -> dict[int, Response]:
    """Six tokens under each of four versions."""
    done: dict[int, Response] = {}
    submit_all(engine)
    for version, model in enumerate(models[1:], start=1):
        drain(engine, done, steps=6)
        engine.update_weights(dict(model.named_parameters()), version, mode)
    drain(engine, done)
    return done


def test_recompute_gives_the_logprobs_of_the_tagged_versions(make_model: ModelMaker) -> None:
    models = [make_model(seed) for seed in range(4)]
    done = run_through_updates(NativeEngine(make_model(0), config=STEPWISE), models, "recompute")
    assert sorted(done) == [0, 1, 2, 3]
    for index, prompt in enumerate(PROMPTS):
        completion = done[index]
        assert len(completion.token_ids) == 24 and set(completion.versions) == {0, 1, 2, 3}
        assert list(completion.versions) == sorted(completion.versions)
        expected = torch.stack([teacher_forced(model, prompt, completion.token_ids) for model in models])
        tagged = expected.gather(0, torch.tensor(completion.versions)[None])[0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), tagged, atol=1e-5, rtol=0)


def test_keep_tags_versions_and_attends_to_the_old_cache(make_model: ModelMaker) -> None:
    models = [make_model(seed) for seed in range(4)]
    done = run_through_updates(NativeEngine(make_model(0), config=STEPWISE), models, "keep")
    for index, prompt in enumerate(PROMPTS):
        completion = done[index]
        assert len(completion.token_ids) == 24 and list(completion.versions) == sorted(completion.versions)
        expected = torch.stack([teacher_forced(model, prompt, completion.token_ids) for model in models])
        tagged = expected.gather(0, torch.tensor(completion.versions)[None])[0]
        off = (torch.tensor(completion.logprobs) - tagged).abs()
        first = completion.versions.index(1)
        assert off[:first].max() < 1e-5, "tokens of the first version see only its keys and values"
        assert off[first:].max() > 1e-2, "later ones see keys and values of the version before"


def test_a_new_sequence_does_not_fork_a_prompt_of_an_older_version(make_model: ModelMaker) -> None:
    engine, new = NativeEngine(make_model(0)), make_model(1)
    params = SamplingParams(max_new_tokens=8)
    engine.submit(Request(uid="p", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1, 2, 3, 4], params=params))
    engine.step()
    engine.update_weights(dict(new.named_parameters()), 1, "keep")
    engine.submit(Request(uid="p", owner=SampleKey(NO_GROUP, 1), prompt_ids=[1, 2, 3, 4], params=params))
    done: dict[int, Response] = {}
    drain(engine, done)
    expected = teacher_forced(new, [1, 2, 3, 4], done[1].token_ids)
    torch.testing.assert_close(torch.tensor(done[1].logprobs), expected, atol=1e-5, rtol=0)


def test_update_reaches_fused_and_tied_weights_and_copies(make_model: ModelMaker) -> None:
    new = make_model(1)
    engine = NativeEngine(make_model(0))
    names = dict(new.named_parameters())
    assert "lm_head.weight" not in names, "a tied name is left out by named_parameters"
    engine.update_weights(names, 1, "recompute")
    engine.update_weights(dict(new.state_dict()), 2, "recompute")
    expected = NativeEngine(make_model(1)).generate(PROMPTS, SamplingParams(max_new_tokens=8))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.zero_()  # training goes on: the engine's weights must not follow
    for ours, theirs in zip(engine.generate(PROMPTS, SamplingParams(max_new_tokens=8)), expected, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs


def test_frozen_tensors_are_served_from_and_never_written(make_model: ModelMaker) -> None:
    snapshot = {name: tensor.detach().clone() for name, tensor in make_model(1).named_parameters()}
    engines = [NativeEngine(make_model(0)) for _ in range(2)]
    for engine in engines:
        engine.update_weights(snapshot, 1, "recompute", frozen=True)
    params = SamplingParams(max_new_tokens=8)
    expected = [one.logprobs for one in NativeEngine(make_model(1)).generate(PROMPTS, params)]
    assert [one.logprobs for one in engines[0].generate(PROMPTS, params)] == expected
    snapshot["model.norm.weight"].mul_(0.5)
    assert [one.logprobs for one in engines[0].generate(PROMPTS, params)] != expected, "it is the same memory"
    snapshot["model.norm.weight"].mul_(2.0)
    engines[0].update_weights(dict(make_model(2).named_parameters()), 2, "recompute")
    assert [one.logprobs for one in engines[1].generate(PROMPTS, params)] == expected, "the other engine keeps its own"
    second = [one.logprobs for one in NativeEngine(make_model(2)).generate(PROMPTS, params)]
    assert [one.logprobs for one in engines[0].generate(PROMPTS, params)] == second


def test_a_frozen_tensor_of_another_kind_is_copied(make_model: ModelMaker) -> None:
    tensors = {name: tensor.detach().double() for name, tensor in make_model(1).named_parameters()}
    engine = NativeEngine(make_model(0))
    engine.update_weights(tensors, 1, "recompute", frozen=True)
    expected = NativeEngine(make_model(1)).generate(PROMPTS, SamplingParams(max_new_tokens=8))
    assert [one.logprobs for one in engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))] == [
        one.logprobs for one in expected
    ]


@pytest.mark.parametrize("way", ["copied", "frozen", "loaded"])
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_an_update_needs_no_second_full_copy(way: str, tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=1000, hidden_size=512, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=2048, max_position_embeddings=64,
    )  # fmt: skip
    engine = NativeEngine(Qwen2ForCausalLM(config), config=NativeConfig(max_running=2, max_tokens=64))
    model = Qwen2ForCausalLM(config)
    held = engine.memory().weights
    assert held > 90e6
    if way == "loaded":
        model.save_pretrained(tmp_path)
        grown = peak_growth(lambda: engine.load(tmp_path, 1, "keep"))
    else:
        tensors = dict(model.named_parameters())
        grown = peak_growth(lambda: engine.update_weights(tensors, 1, "keep", frozen=way == "frozen"))
    assert grown < held / 4, f"the update took {grown / 1e6:.0f} MB at its peak, the weights {held / 1e6:.0f}"


def peak_growth(work: Callable[[], None]) -> int:
    """Bytes of memory above what there was, at the peak of the process."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def test_load_serves_what_a_folder_holds(make_model: ModelMaker, tmp_path: Path) -> None:
    make_model(1).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    engine, params = NativeEngine(make_model(0)), SamplingParams(max_new_tokens=8)
    engine.load(tmp_path, 3, "recompute")
    assert engine.version == 3
    expected = NativeEngine(make_model(1)).generate(PROMPTS, params)
    assert [one.logprobs for one in engine.generate(PROMPTS, params)] == [one.logprobs for one in expected]


def test_load_knows_the_names_that_transformers_saves_experts_under(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, initializer_range=0.1, max_position_embeddings=256,
    )  # fmt: skip
    engine, params = NativeEngine(MixtralForCausalLM(config)), SamplingParams(max_new_tokens=8)
    saved = MixtralForCausalLM(config)
    saved.save_pretrained(tmp_path)
    engine.load(tmp_path, 1, "keep")
    expected = NativeEngine(saved).generate(PROMPTS, params)
    assert [one.logprobs for one in engine.generate(PROMPTS, params)] == [one.logprobs for one in expected]


def test_a_folder_that_does_not_fit_is_refused_as_a_whole(make_model: ModelMaker, tmp_path: Path) -> None:
    engine = NativeEngine(make_model(0))
    before = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    with pytest.raises(UserError, match="there are no weights to load"):
        engine.load(tmp_path, 1, "keep")
    tensors = {name: tensor.detach() for name, tensor in make_model(1).named_parameters()}
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"missing model\.layers\.1\.mlp\.down_proj"):
        engine.load(tmp_path, 1, "keep")
    assert engine.version == 0
    after = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    assert [one.logprobs for one in after] == [one.logprobs for one in before]


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "mode", "untied"])
def test_a_faulty_update_is_refused_as_a_whole(make_model: ModelMaker, fault: str) -> None:
    engine = NativeEngine(make_model(0))
    before = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    tensors: dict[str, Tensor] = dict(make_model(1).named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors["model.layers.1.mlp.down.weight"] = tensors[name]
    elif fault == "shape":
        tensors[name] = tensors[name][:-1]
    elif fault == "untied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    match = {
        "untied": "one tensor",
        "missing": name,
        "unknown": "Did you mean",
        "shape": "has shape",
        "mode": "unknown weight update mode",
    }
    with pytest.raises(UserError, match=match[fault]):
        engine.update_weights(tensors, 1, "swap" if fault == "mode" else "keep")  # type: ignore[arg-type]
    assert engine.version == 0
    after = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    assert [one.logprobs for one in after] == [one.logprobs for one in before]


@pytest.mark.parametrize("kv", ["offload", "recompute"])
@pytest.mark.parametrize("store", ["slots", "pages"])
def test_offload_and_onload_in_the_middle_change_nothing(make_model: ModelMaker, kv: SwitchMode, store: KVKind) -> None:
    expected: dict[int, Response] = {}
    plain = NativeEngine(make_model(0), config=NativeConfig(kv=store))
    submit_all(plain)
    drain(plain, expected)
    options = STEPWISE.model_copy(update={"kv": store})
    engine, done = NativeEngine(make_model(0), config=options), dict[int, Response]()
    submit_all(engine)
    drain(engine, done, steps=5)
    engine.offload(kv)
    assert engine.memory().kv_cache == 0 and engine.step().num_new_tokens == 0
    engine._weights.relocate(poisoned)  # as offload() and onload() do on a GPU
    engine.onload()
    engine.metrics()
    drain(engine, done, steps=1)
    known = sum(map(len, PROMPTS))
    assert (engine.metrics()["prefill_tokens"] > known) == (kv == "recompute"), "the cache was computed anew, or not"
    drain(engine, done)
    for index, completion in expected.items():
        assert (done[index].token_ids, done[index].logprobs) == (completion.token_ids, completion.logprobs)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_weights_may_come_while_the_engine_is_offloaded(make_model: ModelMaker, mode: UpdateMode) -> None:
    there, away = (NativeEngine(make_model(0), config=STEPWISE) for _ in range(2))
    expected, done = dict[int, Response](), dict[int, Response]()
    for engine, into in ((there, expected), (away, done)):
        submit_all(engine)
        drain(engine, into, steps=5)
        if engine is away:
            engine.offload()
        engine.update_weights(dict(make_model(1).named_parameters()), 1, mode, frozen=True)
        engine.onload()
        drain(engine, into)
    assert away.version == 1
    for index, completion in expected.items():
        assert (done[index].token_ids, done[index].logprobs) == (completion.token_ids, completion.logprobs)


def test_paused_engine_does_nothing_until_resumed(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(0), config=STEPWISE)
    submit_all(engine)
    engine.step()
    engine.pause()
    assert engine.step().num_new_tokens == 0
    engine.resume()
    assert engine.step().num_new_tokens == len(PROMPTS)


def test_engines_and_training_share_a_process(make_model: ModelMaker) -> None:
    """Two engines and a model of the same config object, each on a thread, as ranks of the embedded runtime are."""
    trained = make_model(0)
    expected = NativeEngine(make_model(0)).generate(PROMPTS * 4, SamplingParams(max_new_tokens=24))
    engines = [NativeEngine(make_model(0)) for _ in range(2)]
    shared = NativeEngine(type(trained)(trained.config))  # its config object is the trained model's
    shared.update_weights(dict(trained.named_parameters()), 0, "keep")
    engines.append(shared)
    assert trained.config._attn_implementation == "sdpa"
    results: dict[int, list[Response]] = {}

    def generate(number: int) -> None:
        results[number] = engines[number].generate(PROMPTS * 4, SamplingParams(max_new_tokens=24))

    def train() -> None:
        other = copy.deepcopy(trained)
        for _ in range(5):
            other(input_ids=torch.tensor(PROMPTS[:1]), labels=torch.tensor(PROMPTS[:1])).loss.backward()
        results[-1] = []

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(len(engines))]
    threads.append(threading.Thread(target=train))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert -1 in results
    for number in range(len(engines)):
        assert [one.logprobs for one in results[number]] == [one.logprobs for one in expected]
