"""The rollout protocol works over a server in this process."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interlace.core.types import NO_GROUP, FinishReason, Request, Response, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.rollout.config import ServedConfig
from interlace.engines.rollout.protocol import EngineReport
from interlace.engines.rollout.request_checks import Limits
from interlace.engines.rollout.services.engine import ServedModel, ServiceEngine
from interlace.engines.rollout.services.hosted import HostedEngine
from interlace.engines.rollout.services.link import ServerLink
from interlace.engines.rollout.services.protocol import OnDelta, PauseMode, ServiceCapacity, ServiceError
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.weights.config import WeightsConfig
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Route, WeightRef
from interlace.weights.saved import SavedWeights, find_other_form
from interlace.weights.writer import WeightWriter
from tests.unit.engines.train.models import tiny_model

SETTINGS = ServedConfig(heartbeat_s=60.0, health_timeout_s=60.0, progress_s=60.0, start_s=60.0, probe_gap=0.05)
WIDE = Limits(context=4096, longest=4096, vocab_size=10**7, has_tokenizer=False, reads=None)
"""Limits within which a request can have a token that the server does not know."""


def request(index: int, token: int) -> Request:
    params = SamplingParams(max_new_tokens=24)
    return Request(uid="prompt", owner=SampleKey(NO_GROUP, index), prompt_ids=[token], params=params)


@contextmanager
def linked(engine: NativeEngine) -> Iterator[ServerLink]:
    found = ServerLink(lambda: HostedEngine(engine, ServiceCapacity()), SETTINGS)
    found.open()
    yield found
    found.close()


@pytest.fixture
def link() -> Iterator[ServerLink]:
    model = load_model(ModelConfig(path="tiny:micro")).model
    with linked(NativeEngine(model, config=NativeConfig(max_tokens=4096))) as found:
        yield found


def test_a_refusal_that_arrives_during_an_abort_is_reported_by_the_next_step(link: ServerLink) -> None:
    report = EngineReport(attention="server", invariant=True, reason="")
    engine = ServiceEngine(link, ServedModel(limits=WIDE), report)
    good, wrong = request(0, token=5), request(1, token=10**6)
    link.call(lambda client: client.pause("keep"))
    engine.submit(good)
    engine.submit(wrong)
    engine.interrupt()
    assert not engine.step().finished
    link.call(lambda client: client.resume())  # The refusal arrives before the answer.
    [ended] = engine.abort([good.id])
    assert ended.request == good and ended.finish_reason in (FinishReason.ABORTED, FinishReason.LENGTH)
    [refused] = engine.step().finished
    assert refused.request == wrong and "not in the model's vocabulary" in refused.failure


def test_a_request_continues_after_another_client_aborts_it(link: ServerLink) -> None:
    report = EngineReport(attention="server", invariant=True, reason="")
    engine, asked = ServiceEngine(link, ServedModel(limits=WIDE), report), request(0, token=5)
    asked = replace(asked, params=SamplingParams(max_new_tokens=400), streams=True)

    def finish() -> Response:
        while True:
            for done in engine.step().finished:
                return done

    engine.submit(asked)
    whole = finish()
    engine.submit(asked)
    while not engine.step().num_new_tokens:
        continue
    link.call(lambda client: client.pause("abort"))  # as another run does when it takes the server over
    link.call(lambda client: client.resume())
    found = finish()
    assert (found.finish_reason, found.failure) == (FinishReason.LENGTH, "")
    assert [*found.token_ids] == [*whole.token_ids] and len(found.token_ids) == 400


class ContinuingServer(HostedEngine):
    """A server such as vLLM's: it continues a context, and does not tell a prompt from an earlier response."""

    async def generate(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        asked = []
        for each in requests:
            left = each.params.max_new_tokens - len(each.generated_ids)
            params = each.params.model_copy(update={"max_new_tokens": left})
            context = [*each.list_prompt(), *each.generated_ids]
            asked.append(
                replace(
                    each, prompt_ids=context, params=params, generated_ids=(), generated_logprobs=(),
                    generated_versions=(),
                )
            )  # fmt: skip
        await super().generate(asked, on_delta)


def test_a_stop_string_that_began_before_a_resumption_ends_the_response() -> None:
    loaded = load_model(ModelConfig(path="tiny:micro"))
    native = NativeEngine(loaded.model, tokenizer=loaded.tokenizer, config=NativeConfig(max_tokens=4096))
    params = SamplingParams(max_new_tokens=24, temperature=0)
    [whole] = native.generate([[*b"12"]], params)
    stop = loaded.tokenizer.decode(list(whole.token_ids[:11]))
    asked = Request(
        uid="prompt",
        owner=SampleKey(NO_GROUP, 0),
        prompt_ids=[*b"12"],
        params=params.model_copy(update={"stop": (stop,)}),
        generated_ids=whole.token_ids[:6],
        generated_logprobs=whole.logprobs[:6],
        generated_versions=whole.versions[:6],
    )
    link = ServerLink(lambda: ContinuingServer(native, ServiceCapacity()), SETTINGS)
    link.open()
    report = EngineReport(attention="server", invariant=True, reason="")
    limits = replace(WIDE, has_tokenizer=True)
    engine = ServiceEngine(link, ServedModel(limits=limits, tokenizer=loaded.tokenizer), report)
    engine.submit(asked)
    finished: list[Response] = []
    while not finished:
        finished += engine.step().finished
    [response] = finished
    assert (response.finish_reason, [*response.token_ids]) == (FinishReason.STOP, [*whole.token_ids[:11]])
    assert len(response.logprobs) == len(response.versions) == 11
    assert not link.lost and not engine.step().finished
    link.close()


def test_a_server_that_answers_only_about_its_health_is_refused_with_the_limit() -> None:
    class Hanging(HostedEngine):
        async def pause(self, mode: PauseMode) -> None:
            del mode
            await asyncio.sleep(600)

    engine = NativeEngine(load_model(ModelConfig(path="tiny:micro")).model, config=NativeConfig(max_tokens=4096))
    limits = SETTINGS.model_copy(update={"health_timeout_s": 0.1, "start_s": 0.3})
    with pytest.raises(ServiceError, match=r"was not ready to serve within 0.3 s"):
        ServerLink(lambda: Hanging(engine, ServiceCapacity()), limits).open()


@pytest.mark.parametrize("transport", ["shared_memory", "alias"])
def test_a_server_reads_weights_by_the_names_of_saved_folders(tmp_path: Path, transport: str) -> None:
    """vLLM and SGLang know the experts of a mixture one by one, and transformers' models have them in a stack."""
    trained, served = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    trained.save_pretrained(tmp_path)
    writer = WeightWriter(Route(transport=transport, config=WeightsConfig()))
    reader = WeightReader()
    ref = WeightRef(version=1, parts=(writer.write(1, dict(trained.named_parameters())),))
    with linked(NativeEngine(served, config=NativeConfig(max_tokens=256, max_running=2))) as link:
        known = ServedModel(limits=WIDE, form=find_other_form(trained), manifest_reader=os.getpid())
        engine = ServiceEngine(link, known, EngineReport(attention="server", invariant=True, reason=""))
        engine.pull_weights(ref, "recompute", reader)
        assert not engine.health() and engine._source is not None
        assert SavedWeights(engine._source).shapes == SavedWeights(tmp_path).shapes
    for name, tensor in trained.named_parameters():
        assert torch.equal(served.get_parameter(name), tensor)
    reader.close()
    writer.close()
