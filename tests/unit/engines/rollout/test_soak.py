"""With random operations on a tiny KV store, each request ends once, and all memory is released."""

import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from interlace.core.types import NO_GROUP, FinishReason, Request, SampleKey
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams
from interlace.engines.rollout.config import KVKind

ModelMaker = Callable[..., PreTrainedModel]


def random_request(chaos: random.Random, number: int) -> Request:
    params = SamplingParams(
        max_new_tokens=chaos.randint(1, 24), temperature=chaos.choice([0.0, 0.8, 1.0]),
        top_p=chaos.choice([1.0, 1.0, 0.9]), stop_token_ids=chaos.choice([(), (3,), (3, 17, 40, 41)]),
    )  # fmt: skip
    prompt = [chaos.randrange(96) for _ in range(chaos.choice([1, 4, 9, 30]))]
    if chaos.random() < 0.5:
        prompt = [number // 8 % 96] * 12  # siblings
    return Request(uid=f"p{number // 8}", owner=SampleKey(NO_GROUP, number), prompt_ids=prompt, params=params)


@pytest.mark.parametrize("kv", ["slots", "pages"])
@pytest.mark.parametrize("seed", [0, 1])
def test_soak(make_model: ModelMaker, kv: KVKind, seed: int) -> None:
    chaos, total = random.Random(seed), 750
    weights = [dict(make_model(which).named_parameters()) for which in range(2)]
    engine = NativeEngine(make_model(0), config=NativeConfig(max_running=9, max_tokens=160, max_batch_tokens=24, kv=kv))
    cells = engine.metrics()["kv_free_tokens"]
    submitted, ended, aborted, version, ids = 0, dict[str, FinishReason](), 0, 0, list[str]()
    while len(ended) < total:
        for _ in range(chaos.randrange(4)):
            if submitted < total:
                request = random_request(chaos, submitted)
                ids.append(request.id)
                engine.submit(request)
                submitted += 1
        finished = list(engine.step().finished)
        event = chaos.random()
        if event < 0.02:
            version += 1
            engine.update_weights(weights[version % 2], version, chaos.choice(["keep", "recompute"]))
        elif event < 0.05:
            finished += engine.abort([*chaos.sample(ids, min(3, submitted)), "nobody"])
        elif event < 0.06:
            engine.pause()
            assert engine.step().num_new_tokens == 0
            engine.resume()
        elif event < 0.07:
            engine.offload(chaos.choice(["offload", "recompute"]))
            finished += engine.abort(ids[-1:])
            engine.onload()
        for completion in finished:
            assert completion.request.id not in ended, "ended twice"
            ended[completion.request.id] = completion.finish_reason
            length = len(completion.token_ids)
            assert length == len(completion.logprobs) == len(completion.versions)
            assert list(completion.versions) == sorted(completion.versions)
            aborted += completion.finish_reason == FinishReason.ABORTED
            limit = completion.request.params.max_new_tokens
            assert length <= limit and (completion.finish_reason != FinishReason.LENGTH or length == limit)
            stops = set(completion.request.params.stop_token_ids)
            assert (completion.finish_reason == FinishReason.STOP) == bool(stops & set(completion.token_ids[-1:]))
            assert not stops & set(completion.token_ids[:-1])
    engine.offload()  # what ended sequences left for reuse goes
    engine.onload()
    metrics = engine.metrics()
    assert metrics["num_running"] == metrics["num_waiting"] == 0 and metrics["kv_free_tokens"] == cells
    assert metrics["num_preemptions"] > 0 and aborted > 10 and version > 2
