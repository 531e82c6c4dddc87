"""The dialects work with servers that answer like vLLM and SGLang, over real HTTP."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from interlace.core.errors import DiskFullError, UserError
from interlace.core.types import NO_GROUP, FinishReason, Request, SampleKey, SamplingParams
from interlace.engines.rollout.services.dialects import dialect_named, dialect_names
from interlace.engines.rollout.services.link import first_error
from interlace.engines.rollout.services.protocol import (
    Address,
    Connection,
    Delta,
    EngineClient,
    OutOfMemoryError,
    ServiceError,
)
from interlace.weights.ref import WeightRef

PARAMS = SamplingParams(max_new_tokens=3, logit_bias=((5, float("-inf")),))
Body = dict[str, Any]


def request(index: int = 0, **changes: Any) -> Request:
    plain = {"uid": "a", "owner": SampleKey(NO_GROUP, index), "prompt_ids": [1, 2], "params": PARAMS}
    return Request(**{**plain, **changes})


async def served(handle: Callable[[str, Body], Awaitable[Any]], use: Callable[[str], Awaitable[None]]) -> None:
    """Runs a server whose answers `handle` makes of path and body, and `use` with its address."""

    async def answer(got: web.Request) -> web.StreamResponse:
        body = json.loads(await got.read() or b"{}")
        found = await handle(got.path_qs, body)
        if isinstance(found, web.StreamResponse):
            return found
        if isinstance(found, list):  # a stream
            response = web.StreamResponse()
            await response.prepare(got)
            for chunk in found:
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            return response
        return web.json_response(found)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        await use(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def talk(
    dialect: str, handle: Callable[[str, Body], Awaitable[Any]], use: Callable[[EngineClient], Awaitable[None]]
) -> None:
    async def with_client(url: str) -> None:
        client = dialect_named(dialect).connect(Address(url=url, key="k"), seed=0)
        try:
            await use(client)
        finally:
            await client.close()

    asyncio.run(served(handle, with_client))


def vllm_chunk(token: int, end: str | None = None, spans: list[Body] | None = None) -> Body:
    content = [{"token_id": token, "logprob": -0.5 * token}]
    choice = {"token_ids": [token], "logprobs": {"content": content}, "finish_reason": end, "weight_versions": spans}
    return {"choices": [choice], "usage": None}


def test_all_dialects_are_found_by_name() -> None:
    assert dialect_names() == ["interlace", "sglang", "vllm"]
    with pytest.raises(UserError, match=r"unknown dialect of an engine service 'vlm'. Did you mean 'vllm'"):
        dialect_named("vlm")


def test_vllm_streams_tokens_and_reports_versions_at_the_end() -> None:
    seen: list[Body] = []

    async def handle(path: str, body: Body) -> Any:
        seen.append(body)
        spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
        usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}
        return [vllm_chunk(7), vllm_chunk(8), vllm_chunk(9, "length", spans), usage]

    async def use(client: EngineClient) -> None:
        deltas: list[Delta] = []
        await client.generate([request(generated_ids=(6,))], lambda _, delta: deltas.append(delta))
        assert [token for delta in deltas for token in delta.token_ids] == [7, 8, 9]
        assert [logprob for delta in deltas for logprob in delta.logprobs] == [-3.5, -4.0, -4.5]
        assert deltas[-1].all_versions == [(3, 2), (4, 1)] and deltas[-1].finish_reason == FinishReason.LENGTH
        assert deltas[-1].num_cached_tokens == 2

    talk("vllm", handle, use)
    (body,) = seen
    assert body["token_ids"] == [1, 2, 6] and body["sampling_params"]["max_tokens"] == 2
    assert body["cache_salt"] == "load 0" and body["sampling_params"]["logit_bias"] == {"5": -1e30}
    assert body["sampling_params"]["skip_special_tokens"] is False  # else vLLM finds no stop string that is one


def test_vllm_loads_while_it_stands_still_and_salts_its_prefix_cache_by_load() -> None:
    calls: list[tuple[str, Body]] = []

    async def handle(path: str, body: Body) -> Any:
        calls.append((path, body))
        return [vllm_chunk(7, "stop")] if path == "/inference/v1/generate" else {}

    async def use(client: EngineClient) -> None:
        await client.load(Path("/weights"), 5, "keep")
        await client.generate([request()], lambda *_: None)
        await client.load(WeightRef(version=6), 6, "keep")

    talk("vllm", handle, use)
    paths = [path for path, _ in calls]
    update = ["/pause?mode=keep&clear_cache=false", "/collective_rpc", "/update_weight_version", "/resume"]
    assert paths == [*update, "/inference/v1/generate", *update]
    assert calls[1][1] == {"method": "load_folder", "args": ["/weights"]} and calls[4][1]["cache_salt"] == "load 1"
    assert calls[6][1] == {"method": "load_manifest", "args": ['{"version": 6, "parts": []}']}


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("vllm", ["/pause?mode=abort&clear_cache=true"]),
        ("sglang", ["/continue_generation", "/pause_generation", "/flush_cache?timeout=10"]),
    ],
)
def test_a_server_that_a_run_takes_over_drops_its_cache(dialect: str, expected: list[str]) -> None:
    paths: list[str] = []

    async def handle(path: str, body: Body) -> Any:
        paths.append(path)
        return {}

    talk(dialect, handle, lambda client: client.pause("abort"))
    assert paths == expected


def test_vllm_refuses_one_request_and_serves_the_others() -> None:
    async def handle(path: str, body: Body) -> Any:
        if body["token_ids"][0] == 9:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        return [vllm_chunk(7, "stop")]

    async def use(client: EngineClient) -> None:
        found: dict[str, Delta] = {}
        one, other = request(0), request(1, prompt_ids=[9])
        cold = request(2, params=SamplingParams(temperature=0.005))
        await client.generate([one, other, cold], found.__setitem__)
        assert "samples at temperature 0.01 instead of 0.005" in found[cold.id].refusal
        assert found[one.id].finish_reason == FinishReason.STOP and "too long" in found[other.id].refusal

    talk("vllm", handle, use)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_penalties_that_a_server_computes_from_other_tokens_are_refused(dialect: str) -> None:
    """Servers penalize no token of the prompt for its presence, and SGLang none for its repetition."""

    async def handle(path: str, body: Body) -> Any:
        return [vllm_chunk(7, "stop")]

    async def use(client: EngineClient) -> None:
        found: dict[str, Delta] = {}
        done = {"generated_ids": [4], "generated_logprobs": [-1.0], "generated_versions": [0]}
        resumed = request(0, params=SamplingParams(presence_penalty=0.5), **done)
        asked = [resumed, request(1, params=SamplingParams(repetition_penalty=1.1))][: 1 + (dialect == "sglang")]
        await client.generate(asked, found.__setitem__)
        assert "presence_penalty=0.5 would leave out the 1 tokens" in found[resumed.id].refusal
        assert all(found[each.id].refusal for each in asked)

    talk(dialect, handle, use)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "interlace"])
def test_a_stream_that_is_cut_is_a_fault_of_the_server(dialect: str) -> None:
    async def handle(path: str, body: Body) -> Any:
        return [vllm_chunk(7)] if dialect == "vllm" else []

    async def use(client: EngineClient) -> None:
        with pytest.raises((ServiceError, BaseExceptionGroup)) as raised:
            await client.generate([request()], lambda *_: None)
        error = raised.value
        found = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        assert isinstance(found, ServiceError) and "ended" in str(found)

    talk(dialect, handle, use)


def test_sglang_gives_what_is_new_of_chunks_that_hold_all_tokens() -> None:
    def chunk(count: int, end: str | None = None) -> Body:
        meta: Body = {"output_token_logprobs": [[-0.5, 30 + place, None] for place in range(count)]}
        meta["finish_reason"] = end and {"type": end}
        meta["weight_versions"] = [{"version": "2", "start": 0, "end": count}] if end else None
        return {"meta_info": meta}

    async def handle(path: str, body: Body) -> Any:
        assert path == "/generate" and body["input_ids"] == [1, 2, 6]
        return [chunk(1), chunk(3), chunk(3, "length")]

    async def use(client: EngineClient) -> None:
        deltas: list[Delta] = []
        await client.generate([request(generated_ids=(6,))], lambda _, delta: deltas.append(delta))
        assert [list(delta.token_ids) for delta in deltas] == [[30], [31, 32], []]
        assert deltas[-1].all_versions == [(2, 3)] and deltas[-1].finish_reason == FinishReason.LENGTH

    talk("sglang", handle, use)


@pytest.mark.parametrize(("dialect", "key"), [("vllm", "cache_salt"), ("sglang", "extra_key")])
def test_prefixes_that_other_weights_computed_have_another_key(dialect: str, key: str, tmp_path: Path) -> None:
    """With on_update=keep no cache is emptied. The weights of the last evaluation may have an earlier version."""
    asked: list[Body] = []

    async def handle(path: str, body: Body) -> Any:
        if path not in ("/generate", "/inference/v1/generate"):
            return {}
        asked.append(body)
        meta = {"output_token_logprobs": [[-0.5, 7, None]], "finish_reason": {"type": "stop"}}
        return [vllm_chunk(7, "stop") if dialect == "vllm" else {"meta_info": meta}]

    async def use(client: EngineClient) -> None:
        for version in (1, 2, 2):
            await client.generate([request()], lambda _name, _delta: None)
            await client.load(tmp_path, version, "keep")
        await client.generate([request()], lambda _name, _delta: None)

    talk(dialect, handle, use)
    assert len({body[key] for body in asked}) == 4


def test_sglang_gets_no_request_beyond_its_context() -> None:
    """It would refuse a turn whose context leaves less room than max_new_tokens."""
    sent: list[int] = []

    async def handle(path: str, body: Body) -> Any:
        if path == "/server_info":
            return {"context_length": 5}
        sent.append(body["sampling_params"]["max_new_tokens"])
        meta = {"output_token_logprobs": [[-0.5, 30, None]], "finish_reason": {"type": "length"}}
        return [{"meta_info": meta}]

    async def use(client: EngineClient) -> None:
        assert (await client.capacity()).context == 5
        for prompt in ([1, 2], [1, 2, 3, 4]):
            await client.generate([request(prompt_ids=prompt)], lambda *_: None)

    talk("sglang", handle, use)
    assert sent == [3, 1]


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "interlace"])
def test_an_abort_does_not_overtake_the_message_of_its_requests(dialect: str) -> None:
    processed: list[str] = []
    is_slow = asyncio.Event()
    meta = {"output_token_logprobs": [], "finish_reason": {"type": "abort"}}
    end = {
        "vllm": [vllm_chunk(7, "abort")],
        "sglang": [{"meta_info": meta}],
        "interlace": {"id": request().id, "token_ids": [], "logprobs": [], "versions": [], "finish_reason": "aborted"},
    }[dialect]

    async def handle(path: str, body: Body) -> Any:
        if path.endswith("generate"):
            await is_slow.wait()
        processed.append(path)
        return end if path.endswith("generate") else {"version": 0}

    async def use(client: EngineClient) -> None:
        work = asyncio.create_task(client.generate([request()], lambda *_: None))
        await client.health()
        abort = asyncio.create_task(client.abort([request().id]))
        await client.health()
        is_slow.set()
        await asyncio.gather(work, abort)

    talk(dialect, handle, use)
    order = [path.rpartition("/")[2].partition("_")[0] for path in processed]
    assert "abort" not in order[: order.index("generate")]


def test_sglang_refuses_a_request_by_an_abort_with_a_status() -> None:
    async def handle(path: str, body: Body) -> Any:
        reason = {"type": "abort", "message": "too long", "status_code": 400}
        return [{"meta_info": {"output_token_logprobs": [], "finish_reason": reason}}]

    async def use(client: EngineClient) -> None:
        deltas: list[Delta] = []
        await client.generate([request()], lambda _, delta: deltas.append(delta))
        [delta] = deltas
        assert "too long" in delta.refusal and delta.finish_reason is None

    talk("sglang", handle, use)


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (500, "boom", ServiceError),
        (500, "RuntimeError: CUDA out of memory", OutOfMemoryError),
        (507, "No space left on device", DiskFullError),
        (401, "Unauthorized", UserError),
        (404, "Not Found", UserError),
        (400, "bad request", UserError),
    ],
)
def test_errors_of_a_server_are_told_apart(status: int, text: str, error: type[Exception]) -> None:
    async def handle(path: str, body: Body) -> Any:
        return web.Response(status=status, text=text)

    async def use(url: str) -> None:
        connection = Connection(Address(url=url))
        try:
            with pytest.raises(error) as raised:
                await connection.post("/x", timeout_s=5)
            assert type(raised.value) is error and url in str(raised.value)
        finally:
            await connection.close()

    asyncio.run(served(handle, use))
