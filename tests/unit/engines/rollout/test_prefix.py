"""A prefix is computed once, and its reuse gives identical results."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from interlace.core.types import NO_GROUP, Request, Response, SampleKey
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams
from interlace.engines.rollout.config import KVKind

ModelMaker = Callable[..., PreTrainedModel]
LONG = [(7 * place) % 90 for place in range(50)]


def drain(engine: NativeEngine) -> dict[int, Response]:
    done: dict[int, Response] = {}
    while True:
        output = engine.step()
        done |= {completion.request.owner.index: completion for completion in output.finished}
        if not output.num_running and not output.num_waiting:
            return done


def request(index: int, prompt: list[int], uid: str = "p") -> Request:
    return Request(
        uid=uid, owner=SampleKey(NO_GROUP, index), prompt_ids=prompt, params=SamplingParams(max_new_tokens=12)
    )


@pytest.mark.parametrize("kv", ["slots", "pages"])
@pytest.mark.parametrize("prompt", [[4, 5, 6], LONG], ids=["short", "long"])
def test_a_group_prefills_its_prompt_once(make_model: ModelMaker, prompt: list[int], kv: KVKind) -> None:
    alone = NativeEngine(make_model(), config=NativeConfig(kv=kv, prefix_cache=False))
    expected = {}
    for index in range(8):
        alone.submit(request(index, prompt))
        expected |= drain(alone)
    engine = NativeEngine(make_model(), config=NativeConfig(kv=kv))
    engine.metrics()
    for index in range(8):
        engine.submit(request(index, prompt))
    found = drain(engine)
    # The leader's prompt but its last token, which counts as decoding; siblings run their last token alone.
    assert engine.metrics()["prefill_tokens"] == len(prompt) - 1
    assert engine.metrics()["kv_use"] == 0
    for index, completion in expected.items():
        assert (found[index].token_ids, found[index].logprobs) == (completion.token_ids, completion.logprobs)


@pytest.mark.parametrize("kv", ["slots", "pages"])
def test_the_next_turn_reuses_the_last(make_model: ModelMaker, kv: KVKind) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(kv=kv))
    engine.submit(request(0, LONG))
    first = drain(engine)[0]
    second = [*LONG, *first.token_ids, 3, 4, 5]
    engine.metrics()
    engine.submit(request(1, second))
    reused = drain(engine)[1]
    assert engine.metrics()["reused_tokens"] == len(LONG) + 12 - 1, "all that was computed in the first turn"
    fresh = NativeEngine(make_model(), config=NativeConfig(kv=kv))
    fresh.submit(request(1, second))
    expected = drain(fresh)[1]
    assert (reused.token_ids, reused.logprobs) == (expected.token_ids, expected.logprobs)


def test_an_aborted_sample_comes_back_to_its_cells(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(steps_per_schedule=1))
    engine.submit(request(0, LONG))
    for _ in range(4):
        engine.step()
    (partial,) = engine.abort()
    engine.metrics()
    engine.submit(
        Request(
            uid="p",
            owner=SampleKey(NO_GROUP, 0),
            prompt_ids=LONG,
            params=partial.request.params,
            generated_ids=partial.token_ids,
            generated_logprobs=partial.logprobs,
            generated_versions=partial.versions,
        )
    )
    drain(engine)
    metrics = engine.metrics()
    assert metrics["reused_tokens"] == len(LONG) + len(partial.token_ids) - 1 and metrics["prefill_tokens"] == 0


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_nothing_is_reused_across_versions(make_model: ModelMaker, mode: str) -> None:
    engine = NativeEngine(make_model())
    engine.submit(request(0, LONG))
    engine.submit(request(1, LONG[:30]))
    for _ in range(3):
        engine.step()
    engine.abort([request(0, LONG).id])
    engine.update_weights(dict(make_model(1).named_parameters()), 1, mode)  # type: ignore[arg-type]
    engine.submit(request(2, [*LONG, 1, 2]))
    found = drain(engine)
    fresh = NativeEngine(make_model(1))
    fresh.submit(request(2, [*LONG, 1, 2]))
    assert found[2].logprobs == drain(fresh)[2].logprobs


def test_what_waits_to_be_reused_gives_way(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(max_tokens=256, max_running=4))
    for index in range(12):
        engine.submit(request(index, [(index + 5 * place) % 90 for place in range(40)], uid=f"p{index}"))
    assert len(drain(engine)) == 12
    assert engine.metrics()["num_preemptions"] == 0
