"""The client protocol works without a socket: an engine in this process serves coroutines."""

import asyncio
import copy
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from interlace.core.errors import UserError
from interlace.core.types import (
    NO_GROUP,
    FinishReason,
    Prompt,
    Request,
    Response,
    Sample,
    SampleKey,
    SamplingParams,
    Segment,
)
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.rollout.config import AddressConfig
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.rollout.services import routes
from interlace.engines.rollout.services.dialects.interlace import connect
from interlace.engines.rollout.services.hosted import HostedEngine
from interlace.engines.rollout.services.protocol import (
    Address,
    Delta,
    PauseMode,
    ServiceCapacity,
    ServiceError,
    read_manifest,
    write_manifest,
)
from interlace.engines.rollout.services.routes import EngineRoutes
from interlace.engines.rollout.services.wire import ROUTES
from interlace.engines.train import LogprobEngine, TrainConfig
from interlace.engines.train.export import list_named_weights
from interlace.models.config import ModelConfig
from interlace.models.loading import count_ids, load_model
from interlace.weights.config import WeightsConfig
from interlace.weights.ref import Route, WeightRef
from interlace.weights.writer import WeightWriter

MODEL = ModelConfig(path="tiny:micro")
PARAMS = SamplingParams(max_new_tokens=24)


def make() -> NativeEngine:
    return NativeEngine(load_model(MODEL).model, config=NativeConfig(max_running=4, max_tokens=4096), seed=3)


def request(index: int = 0, params: SamplingParams = PARAMS) -> Request:
    return Request(uid="prompt", owner=SampleKey(NO_GROUP, index), prompt_ids=[5, 6, 7], params=params)


@pytest.fixture
def hosted() -> Iterator[HostedEngine]:
    engine = HostedEngine(make(), ServiceCapacity(model="tiny:micro"))
    yield engine
    asyncio.run(engine.close())


def test_scores_leave_out_ids_that_are_never_drawn() -> None:
    """As the trainer does; the check of new weights found other log-probs, and the server counted as lost."""
    loaded = load_model(MODEL)
    size = count_ids(loaded.tokenizer)
    loaded.model.resize_token_embeddings(2 * size)
    trainer = LogprobEngine(copy.deepcopy(loaded.model), config=TrainConfig(num_ids=size))
    native = NativeEngine(loaded.model, tokenizer=loaded.tokenizer, config=NativeConfig(max_running=2, max_tokens=512))
    text = [5, 6, 7, 8, 9]
    [found] = asyncio.run(score_once(HostedEngine(native, ServiceCapacity()), text))
    prompt = Prompt(uid="", token_ids=np.array(text[:1], np.int32), text="", answer="")
    segment = Segment(token_ids=np.array(text[1:], np.int32))
    [wanted] = trainer.logprobs([Sample(key=SampleKey(NO_GROUP, 0), prompt=prompt, segments=(segment,))])
    assert found == pytest.approx(wanted.tolist(), abs=1e-4)


async def score_once(hosted: HostedEngine, text: list[int]) -> list[list[float]]:
    try:
        return await hosted.score([text])
    finally:
        await hosted.close()


def test_the_trainer_leaves_out_ids_that_servers_of_interlace_never_draw() -> None:
    """Also if the servers are at an address: importance ratios were too low by the probability of these ids."""

    def draws_known_ids(**settings: object) -> bool:
        return create_kind(
            AddressConfig.parse({"engine": "address", "urls": ["http://here:1"], **settings})
        ).draws_known_ids

    assert draws_known_ids(dialect="interlace") and not draws_known_ids(dialect="vllm")


class Received:
    """The deltas of some requests, put together."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[Delta]] = {}

    def __call__(self, name: str, delta: Delta) -> None:
        self.deltas.setdefault(name, []).append(delta)

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas.get(name, ()) for token in delta.token_ids]

    def logprobs(self, name: str) -> list[float]:
        return [logprob for delta in self.deltas[name] for logprob in delta.logprobs]

    def end(self, name: str) -> FinishReason | None:
        return self.deltas[name][-1].finish_reason


def alone(requests: Sequence[Request]) -> dict[str, Response]:
    engine, done = make(), dict[str, Response]()
    for one in requests:
        engine.submit(one)
    while len(done) < len(requests):
        done.update((one.request.id, one) for one in engine.step().finished)
    return done


def test_deltas_add_up_to_what_the_engine_draws_by_itself(hosted: HostedEngine) -> None:
    requests, received = [request(index) for index in range(6)], Received()
    asyncio.run(hosted.generate(requests, received))
    for name, expected in alone(requests).items():
        assert tuple(received.tokens(name)) == expected.token_ids
        assert tuple(received.logprobs(name)) == expected.logprobs
        assert received.end(name) == expected.finish_reason


def test_an_aborted_request_is_answered_with_its_tokens_and_continues_elsewhere(hosted: HostedEngine) -> None:
    long, received = request(params=SamplingParams(max_new_tokens=400)), Received()

    async def run() -> None:
        work = asyncio.create_task(hosted.generate([replace(long, streams=True)], received))
        while not received.tokens(long.id):
            await asyncio.sleep(0)
        await hosted.abort([long.id, "unknown"])
        await work

    asyncio.run(run())
    partial = received.tokens(long.id)
    assert received.end(long.id) == FinishReason.ABORTED and 0 < len(partial) < 400
    resumed = replace(
        long,
        generated_ids=partial,
        generated_logprobs=received.logprobs(long.id),
        generated_versions=[0] * len(partial),
    )
    rest = Received()
    asyncio.run(hosted.generate([resumed], rest))
    assert tuple(partial + rest.tokens(long.id)) == alone([long])[long.id].token_ids


def test_a_paused_engine_holds_requests_until_it_resumes(hosted: HostedEngine) -> None:
    received = Received()

    async def run() -> None:
        await hosted.pause("keep")
        work = asyncio.create_task(hosted.generate([request()], received))
        assert (await hosted.health()).is_paused
        await asyncio.sleep(0.05)
        assert not received.deltas
        await hosted.resume()
        await work

    asyncio.run(run())
    assert len(received.tokens(request().id)) == 24


@pytest.mark.parametrize(("mode", "reused"), [("keep", True), ("abort", False)])
def test_an_engine_that_a_run_takes_over_reuses_no_older_tokens(
    hosted: HostedEngine, mode: PauseMode, reused: bool
) -> None:
    first = replace(request(), may_continue=True)

    async def run() -> int:
        received = Received()
        await hosted.generate([first], received)
        await hosted.pause(mode)
        await hosted.resume()
        turn = replace(first, uid="turn", prompt_ids=[5, 6, 7, *received.tokens(first.id), 8])
        await hosted.generate([turn], received)
        return received.deltas[turn.id][-1].num_cached_tokens

    assert (asyncio.run(run()) > 0) is reused


def test_a_request_that_is_withdrawn_while_the_engine_is_busy_does_not_run(hosted: HostedEngine) -> None:
    long, received = request(params=SamplingParams(max_new_tokens=900)), Received()
    begun, go = threading.Event(), threading.Event()

    async def run() -> None:
        busy = asyncio.create_task(hosted._call_function(lambda: (begun.set(), go.wait())))  # as a load of weights
        await asyncio.to_thread(begun.wait)
        work = asyncio.create_task(hosted.generate([long], lambda *_: None))
        while not hosted._commands.qsize():
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        go.set()
        await busy
        await hosted.generate([long], received)

    asyncio.run(run())
    assert received.end(long.id) == FinishReason.LENGTH and len(received.tokens(long.id)) == 900


def test_a_refused_request_ends_alone(hosted: HostedEngine) -> None:
    wrong, received = replace(request(1), prompt_ids=[10**6]), Received()
    asyncio.run(hosted.generate([request(0), wrong], received))
    assert "not in the model's vocabulary" in received.deltas[wrong.id][-1].refusal
    assert received.end(request(0).id) == FinishReason.LENGTH


def test_a_request_that_fails_is_refused_with_the_reason(hosted: HostedEngine) -> None:
    overflows = SamplingParams.model_construct(logit_bias=((5, 1e39),), max_new_tokens=4)
    failing, received = request(1, overflows), Received()
    asyncio.run(hosted.generate([request(0), failing], received))
    assert "logit_bias" in received.deltas[failing.id][-1].refusal and received.end(failing.id) is None
    assert received.end(request(0).id) == FinishReason.LENGTH


def test_a_version_is_loaded_between_two_tokens_and_reported(hosted: HostedEngine, tmp_path: Path) -> None:
    load_model(MODEL.model_copy(update={"seed": 9})).model.save_pretrained(tmp_path)
    long, received = request(params=SamplingParams(max_new_tokens=400)), Received()

    async def run() -> None:
        work = asyncio.create_task(hosted.generate([replace(long, streams=True)], received))
        while not received.tokens(long.id):
            await asyncio.sleep(0)
        await hosted.load(tmp_path, 4, "keep")
        assert (await hosted.health()).version == 4
        await work

    asyncio.run(run())
    runs = [run for delta in received.deltas[long.id] for run in delta.versions]
    versions = [version for version, count in runs for _ in range(count)]
    assert len(versions) == 400 and set(versions) == {0, 4} and versions == sorted(versions)


def test_a_server_reads_a_version_from_the_memory_of_the_trainer_by_its_manifest(
    hosted: HostedEngine,
) -> None:
    trained = load_model(MODEL.model_copy(update={"seed": 9})).model
    route = Route(transport="shared_memory", config=WeightsConfig(transport="shared_memory"))
    writer = WeightWriter(route)
    try:
        part = writer.write(4, dict(list_named_weights(trained)))
        ref = read_manifest(write_manifest(WeightRef(version=4, parts=(part,))))
        asyncio.run(hosted.load(ref, 4, "recompute"))
    finally:
        writer.close()  # the engine serves from the mapped memory, also after the trainer has ended
    received = Received()
    asyncio.run(hosted.generate([request()], received))
    expected = NativeEngine(trained, config=NativeConfig(max_running=4, max_tokens=4096), seed=3)
    expected.submit(request())
    while not (finished := expected.step().finished):
        pass
    assert received.tokens(request().id) == list(finished[0].token_ids)
    assert {version for delta in received.deltas[request().id] for version, _ in delta.versions} == {4}


@pytest.mark.parametrize("source", ["raw", "cast", "a folder"])
def test_an_engine_generates_while_a_version_is_read_and_serves_it_until_the_next(
    hosted: HostedEngine, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load_model(MODEL.model_copy(update={"seed": 9})).model
    state = dict(list_named_weights(trained))
    for tensor in state.values():
        tensor.copy_(tensor.bfloat16())  # so that the codec rounds nothing
    trained.save_pretrained(tmp_path)
    is_folder = source == "a folder"
    config = WeightsConfig(transport="shared_memory", codec="raw" if is_folder else source)
    writer, received = WeightWriter(Route(transport="shared_memory", config=config)), Received()
    long = request(params=SamplingParams(max_new_tokens=3500))
    open_now = hosted._engine.open_folder if is_folder else hosted._reader.open

    def open_late(given: Any) -> Any:
        before, until_s = len(received.tokens(long.id)), time.monotonic() + 20
        while len(received.tokens(long.id)) == before:
            assert received.end(long.id) is None, "the request ended before the load"
            assert time.monotonic() < until_s, "the engine stands still while a version is read"
            time.sleep(0.001)
        return open_now(given)

    async def run() -> None:
        work = asyncio.create_task(hosted.generate([replace(long, streams=True)], received))
        while not received.tokens(long.id):
            await asyncio.sleep(0)
        for version in (1, 2):
            ref = WeightRef(version=version, parts=(writer.write(version, state),))
            await hosted.load(tmp_path if is_folder else ref, version, "recompute")
        for version in (3, 4, 5):  # the trainer goes on with other weights, and the engine lags
            writer.write(version, {name: tensor + 1 for name, tensor in state.items()})
        for file in tmp_path.glob("*.safetensors"):
            with file.open("r+b") as opened:
                opened.write(bytes(file.stat().st_size))
        await hosted.abort([long.id])
        await work

    monkeypatch.setattr(
        hosted._engine if is_folder else hosted._reader, "open_folder" if is_folder else "open", open_late
    )
    try:
        asyncio.run(run())
        short = Received()
        asyncio.run(hosted.generate([request(1)], short))
    finally:
        writer.close()
    expected = NativeEngine(trained, config=NativeConfig(max_running=4, max_tokens=4096), seed=3)
    expected.submit(request(1))
    while not (finished := expected.step().finished):
        pass
    assert short.tokens(request(1).id) == list(finished[0].token_ids)
    assert short.logprobs(request(1).id) == list(finished[0].logprobs)


def test_scores_are_the_log_probs_of_the_tokens_that_were_drawn(hosted: HostedEngine) -> None:
    done = alone([request()])[request().id]
    [scores] = asyncio.run(hosted.score([[5, 6, 7, *done.token_ids]]))
    assert scores[2:] == pytest.approx(list(done.logprobs), abs=1e-4)


def test_a_failed_load_leaves_the_old_weights(hosted: HostedEngine, tmp_path: Path) -> None:
    load_model(ModelConfig(path="tiny:mini")).model.save_pretrained(tmp_path)
    with pytest.raises((UserError, RuntimeError)):
        asyncio.run(hosted.load(tmp_path, 4, "recompute"))
    assert asyncio.run(hosted.health()).version == 0
    received = Received()
    asyncio.run(hosted.generate([request()], received))
    assert tuple(received.tokens(request().id)) == alone([request()])[request().id].token_ids


def test_a_client_reads_why_the_engine_of_a_server_failed() -> None:
    engine, received = make(), Received()
    engine.model.get_parameter("lm_head.weight").data.fill_(math.nan)
    hosted = HostedEngine(engine, ServiceCapacity())

    async def run() -> None:
        app = web.Application()
        EngineRoutes(hosted, "key").add_to(app)
        async with TestServer(app) as server:
            client = connect(Address(url=f"http://127.0.0.1:{server.port}", key="key"), seed=0)
            await client.generate([request()], received)
            with pytest.raises(ServiceError, match="the engine has failed: the model's logits are not finite"):
                await client.health()
            await client.close()
        await hosted.close()

    asyncio.run(run())
    assert "not finite" in received.deltas[request().id][-1].refusal


def test_a_request_that_is_too_large_or_has_an_odd_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of any size was read into memory."""
    monkeypatch.setattr(routes, "LARGEST_BODY", 1 << 20)
    hosted = HostedEngine(make(), ServiceCapacity())
    large = b'{"ids": ["' + b"a" * (1 << 20) + b'"]}'

    async def send_in_parts() -> AsyncIterator[bytes]:
        yield large[:1000]
        yield large[1000:]

    async def run() -> None:
        app = web.Application()
        EngineRoutes(hosted, "key").add_to(app)
        async with TestServer(app) as server, ClientSession(server.make_url("/")) as session:

            async def ask(content: bytes | AsyncIterator[bytes]) -> tuple[int, str]:
                keys = {"Authorization": "Bearer key"}
                async with session.post(f"{ROUTES}/abort", data=content, headers=keys) as answer:
                    return answer.status, await answer.text()

            for content in (large, send_in_parts()):
                status, text = await ask(content)
                assert status == 413 and "larger than 1 MiB" in text
            assert (await ask(b'{"ids": []}'))[0] == 200
            assert (await ask(b"[" * 100_000))[0] == 400
            read, write = await asyncio.open_connection("127.0.0.1", server.port)
            write.write(f"POST {ROUTES}/health HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n".encode())
            write.write(b"Authorization: Bearer \xff\r\n\r\n")
            assert b" 401 " in await read.readline()
            write.close()
        await hosted.close()

    asyncio.run(run())
