"""The contract of a rollout engine, tested for every engine: native in this process, native in a server process, and
vLLM's server in `make test-vllm`.
"""

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from interlace.core.errors import UserError
from interlace.core.types import FinishReason, Request, Response, SamplingParams
from interlace.engines.rollout.protocol import RolloutEngine, ServiceEngineProtocol, UpdateMode
from interlace.models.loading import load_model, load_tokenizer
from interlace.models.size import model_size
from tests.contract.engines import (
    MAX_TOKENS,
    MODEL,
    close_engine,
    drain,
    make_engine,
    model_of,
    reference_logprobs,
    request,
    run,
)

ENGINES = ["native", "interlace", pytest.param("vllm", marks=pytest.mark.vllm)]
LONG = SamplingParams(max_new_tokens=900)
"""Long enough that a server, which decodes on its own, is still at it when the next call comes."""
OLD, NEW = model_of(0), model_of(3)


@pytest.fixture(scope="module", params=ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def started(name: str) -> Iterator[RolloutEngine]:
    engine = make_engine(name)
    yield engine
    close_engine(engine)


@pytest.fixture
def engine(started: RolloutEngine) -> Iterator[RolloutEngine]:
    """One that has the initial weights, and nothing live."""
    yield started
    started.onload()
    started.resume()
    started.abort()
    started.update_weights(dict(OLD.state_dict()), 0, "recompute")


def close(completion: Response, model: torch.nn.Module = OLD) -> bool:
    expected = reference_logprobs(model, completion)  # type: ignore[arg-type]
    return torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_greedy_is_what_transformers_generates(engine: RolloutEngine) -> None:
    prompts = [[5, 6, 7, 8], [9], list(range(40, 80)), [5, 6, 7, 8, 9, 10]]
    params = SamplingParams(max_new_tokens=24, temperature=0)
    done = run(engine, *(request(index, prompt, params) for index, prompt in enumerate(prompts)))
    for index, prompt in enumerate(prompts):
        expected = OLD.generate(  # type: ignore[operator]
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=24, eos_token_id=None,
        )  # fmt: skip
        assert list(done[index].token_ids) == expected[0, len(prompt) :].tolist()
        assert done[index].finish_reason == FinishReason.LENGTH and close(done[index])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_p": 0.6, "min_p": 0.2},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.8},
        {"logit_bias": ((5, 4.0), (6, -100.0))},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.2, "logit_bias": ((7, 2.0),)},
    ],
)
def test_logprobs_are_those_of_the_distribution_sampled_from(engine: RolloutEngine, changes: dict[str, object]) -> None:
    params = SamplingParams.model_validate({"max_new_tokens": 16} | changes)
    done = run(engine, *(request(index, params=params) for index in range(6)))
    assert all(close(one) for one in done.values())
    assert len({one.token_ids for one in done.values()}) > 1
    assert all(one.versions == (0,) * 16 for one in done.values())


def test_tokens_are_drawn_as_often_as_their_probability_says(engine: RolloutEngine) -> None:
    """A choice of two tokens, one three times as likely."""
    bias = ((20, 60.0), (21, 60.0 + float(np.log(3.0))))
    flat = {name: torch.zeros_like(tensor) for name, tensor in OLD.state_dict().items()}
    engine.update_weights(flat, 1, "recompute")
    params = SamplingParams(max_new_tokens=50, logit_bias=bias)
    done = run(engine, *(request(index, params=params) for index in range(8)))
    drawn = [token for one in done.values() for token in one.token_ids]
    assert set(drawn) == {20, 21}
    assert 0.67 < drawn.count(21) / len(drawn) < 0.83  # four standard deviations of 400 draws


def test_a_stop_token_ends_a_response_and_is_kept(engine: RolloutEngine) -> None:
    (free,) = run(engine, request(params=LONG)).values()
    stop = free.token_ids[10]
    first = free.token_ids.index(stop)
    (done,) = run(engine, request(params=LONG.model_copy(update={"stop_token_ids": (stop,)}))).values()
    assert done.finish_reason == FinishReason.STOP
    assert done.token_ids[-1] == stop and stop not in done.token_ids[:-1]
    assert done.token_ids == free.token_ids[: first + 1]  # the same seed draws the same
    assert len(done.logprobs) == len(done.token_ids) and close(done)


def test_a_stop_string_ends_a_response(engine: RolloutEngine) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=0)
    (free,) = run(engine, request(params=params)).values()
    text = load_tokenizer(MODEL)
    wanted = str(text.decode(list(free.token_ids[5:8])))
    assert wanted
    (done,) = run(engine, request(params=params.model_copy(update={"stop": (wanted,)}))).values()
    assert done.finish_reason == FinishReason.STOP and len(done.token_ids) <= 8
    assert done.token_ids == free.token_ids[: len(done.token_ids)]
    assert wanted in str(text.decode(list(done.token_ids)))


def test_nothing_ends_a_response_that_names_no_stop(engine: RolloutEngine) -> None:
    eos = load_model(MODEL).stop_token_ids[0]
    params = SamplingParams(max_new_tokens=6, logit_bias=((eos, 100.0),))
    (done,) = run(engine, request(params=params)).values()
    assert done.token_ids == (eos,) * 6 and done.finish_reason == FinishReason.LENGTH


def begin(engine: RolloutEngine, *requests: Request) -> None:
    """Submits requests and pauses the engine once each of them has tokens: a server decodes without being asked."""
    names = {one.id for one in requests}
    for one in requests:
        engine.submit(replace(one, streams=True))
    while True:
        if not isinstance(engine, ServiceEngineProtocol):
            engine.interrupt()
        output = engine.step()
        assert not output.lost, output.lost
        finished = output.finished
        if all(output.drawn.get(name) for name in names):
            engine.pause()
            finished = engine.step().finished
            if not finished:
                return
            engine.resume()
        for ended in finished:  # on a busy machine, before this process could pause the server
            engine.submit(ended.request)


def test_an_aborted_request_goes_on_with_what_it_had(engine: RolloutEngine) -> None:
    begin(engine, *(request(index, params=LONG) for index in range(3)))
    partial = _partial(engine)
    engine.resume()
    assert partial.finish_reason == FinishReason.ABORTED and close(partial)
    engine.submit(partial.resumed)
    done = drain(engine)
    assert sorted(done) == [0, 1, 2]
    assert done[1].token_ids[: len(partial.token_ids)] == partial.token_ids
    assert all(len(one.token_ids) == len(one.versions) == 900 and close(one) for one in done.values())


def _partial(engine: RolloutEngine) -> Response:
    (partial,) = engine.abort(["no such request", request(1).id])
    return partial


def test_what_a_request_that_streams_has_drawn_is_the_beginning_of_its_response(engine: RolloutEngine) -> None:
    begin(engine, request(1, params=LONG))
    partial = _partial(engine)
    engine.resume()
    engine.submit(partial.resumed)
    engine.submit(request(2, params=LONG))
    seen, done = [], dict[str, Response]()
    while len(done) < 2:
        if not isinstance(engine, ServiceEngineProtocol):
            engine.interrupt()
        output = engine.step()
        done.update((one.request.id, one) for one in output.finished)
        assert set(output.drawn) == {partial.request.id} - set(done), "only what streams, while it is live"
        seen += output.drawn.values()
    whole = list(done[partial.request.id].token_ids)
    assert len(seen) > 1 and all(len(drawn) >= len(partial.token_ids) for drawn in seen)
    assert all(whole[: len(drawn)] == list(drawn) for drawn in seen)


def test_a_paused_engine_stands_still(engine: RolloutEngine) -> None:
    engine.submit(request())
    engine.pause()
    assert engine.step().num_new_tokens == 0 and engine.step().num_running + engine.step().num_waiting == 1
    engine.resume()
    assert len(drain(engine)[0].token_ids) == 12


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("way", ["tensors", "untied", "folder"])
def test_weights_change_between_two_steps(engine: RolloutEngine, mode: UpdateMode, way: str, tmp_path: Path) -> None:
    """Of a model that ties its head, an update may name the tied tensor once (as saved folders do) or twice."""
    if way == "folder":
        NEW.save_pretrained(tmp_path)
    begin(engine, *(request(index, params=LONG) for index in range(2)))
    if way == "folder":
        engine.load(tmp_path, 7, mode)
    else:
        given = {name: tensor for name, tensor in NEW.state_dict().items() if way == "tensors" or "lm_head" not in name}
        engine.update_weights(given, 7, mode)
    assert engine.version == 7
    engine.resume()
    engine.submit(request(5))
    done = drain(engine)
    for one in (done[0], done[1]):
        old = one.versions.count(0)
        assert 0 < old < 900 and one.versions == (0,) * old + (7,) * (900 - old)
        logprobs = torch.tensor(one.logprobs)
        torch.testing.assert_close(logprobs[:old], reference_logprobs(OLD, one)[:old], atol=1e-4, rtol=0)
        if mode == "recompute":
            torch.testing.assert_close(logprobs[old:], reference_logprobs(NEW, one)[old:], atol=1e-4, rtol=0)
    assert set(done[5].versions) == {7} and close(done[5], NEW)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "untied", "mode"])
def test_a_refused_update_leaves_the_engine_whole(engine: RolloutEngine, fault: str) -> None:
    tensors, mode = dict(NEW.state_dict()), "recompute"
    first, last = "model.layers.0.self_attn.q_proj.weight", "model.layers.3.mlp.down_proj.weight"
    if fault == "missing":
        del tensors[last]
    elif fault == "unknown":
        tensors["model.layers.9.mlp.down_proj.weight"] = tensors[last]
    elif fault == "shape":
        tensors[last] = tensors[last][:-1]
    elif fault == "untied":
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    else:
        mode = "sometimes"
    assert first in tensors
    begin(engine, request(0, params=LONG))
    with pytest.raises(UserError):
        engine.update_weights(tensors, 9, mode)  # type: ignore[arg-type]
    assert engine.version == 0
    engine.resume()
    done = drain(engine)[0]
    assert done.versions == (0,) * 900 and close(done)


def test_what_runs_survives_a_device_that_changes_hands(engine: RolloutEngine) -> None:
    begin(engine, request(0, params=LONG))
    engine.offload()
    engine.submit(request(1))
    assert engine.step().num_new_tokens == 0
    engine.onload()
    engine.resume()
    done = drain(engine)
    assert [len(done[index].token_ids) for index in (0, 1)] == [900, 12]
    assert close(done[0]) and close(done[1])


def test_an_update_reaches_an_engine_that_is_away(engine: RolloutEngine) -> None:
    engine.offload()
    engine.onload()
    engine.update_weights(dict(NEW.state_dict()), 2, "recompute")
    assert close(run(engine, request())[0], NEW)


def test_what_cannot_be_served_is_refused_and_not_waited_for(engine: RolloutEngine) -> None:
    context = OLD.config.max_position_embeddings
    with pytest.raises(UserError, match="prompt is empty"):
        engine.submit(request(prompt=[]))
    with pytest.raises(UserError, match=f"prompt has {context} tokens and the model's context holds {context}"):
        engine.submit(request(prompt=[5] * context))
    with pytest.raises(UserError, match="not in the model's vocabulary"):
        engine.submit(request(prompt=[10**6]))
    engine.submit(request())
    with pytest.raises(ValueError, match="already live"):
        engine.submit(request())
    assert list(drain(engine)) == [0]


def test_a_response_ends_with_the_context(engine: RolloutEngine) -> None:
    context = OLD.config.max_position_embeddings
    done = run(engine, request(prompt=[5] * (context - 4), params=SamplingParams(max_new_tokens=40)))[0]
    assert done.finish_reason == FinishReason.LENGTH and 4 <= len(done.token_ids) <= 5


def test_the_ledger_is_given_true_bytes(engine: RolloutEngine) -> None:
    size, memory = model_size(OLD), engine.memory()
    assert size.weight_bytes <= memory.weights <= 1.2 * size.weight_bytes
    needed = MAX_TOKENS * size.kv_bytes_per_token
    assert needed <= memory.kv_cache <= 1.2 * needed


def test_a_new_seed_draws_other_tokens_and_the_same_seed_the_same(engine: RolloutEngine) -> None:
    first, again = (run(engine, *map(request, range(4))) for _ in range(2))
    assert [first[index].token_ids for index in range(4)] == [again[index].token_ids for index in range(4)]
    assert len({one.token_ids for one in first.values()}) == 4


def global_state() -> tuple[object, ...]:
    """Returns the state of the generators of random numbers, and a function of torch that a library may replace."""
    numbers = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    return *numbers, torch.set_num_threads


def test_several_engines_serve_on_threads_of_one_process(engine: RolloutEngine, name: str) -> None:
    """To start one and to end it changes nothing else in the process."""
    before, found = global_state(), dict[tuple[int, int], dict[int, Response]]()
    other = make_engine(name)
    assert global_state() == before

    def serve(number: int, one: RolloutEngine) -> None:
        for version in (1, 2, 3):
            one.update_weights(dict((NEW if version % 2 else OLD).state_dict()), version, "recompute")
            found[number, version] = run(one, *map(request, range(4)))

    threads = [threading.Thread(target=serve, args=(number, one)) for number, one in enumerate((engine, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    before = global_state()
    close_engine(other)
    assert global_state() == before
    for (_, version), done in found.items():
        assert all(set(one.versions) == {version} for one in done.values())
        assert all(close(one, NEW if version % 2 else OLD) for one in done.values())
