"""Servers at addresses that cannot serve a run are refused before any work starts, with the address and the fix."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from interlace.core.errors import UserError
from interlace.core.tasks import LoopThread
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.rollout.services.hosted import HostedEngine
from interlace.engines.rollout.services.process import free_port
from interlace.engines.rollout.services.protocol import Delta, ServiceCapacity
from interlace.engines.rollout.services.routes import EngineRoutes
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe

KEY_ENV, KEY = "INTERLACE_TEST_KEY", "a key for tests"
SIZES = ServiceCapacity(model="tiny:micro", identity="", vocab_size=262, context=512, dtype="float32", seed=0)


@contextmanager
def serving(hosted: HostedEngine, num_addresses: int = 1) -> Iterator[list[str]]:
    """Serves an engine of this process at some addresses."""
    thread = LoopThread("server")

    async def start() -> tuple[web.AppRunner, list[str]]:
        app = web.Application()
        EngineRoutes(hosted, KEY).add_to(app)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        for _ in range(num_addresses):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, [f"http://127.0.0.1:{address[1]}" for address in runner.addresses]

    runner, urls = thread.run(start())
    try:
        yield urls
    finally:
        thread.run(runner.cleanup())
        thread.close()


@pytest.fixture(scope="module")
def hosted() -> Iterator[HostedEngine]:
    engine = NativeEngine(load_model(ModelConfig(path="tiny:micro")).model, config=NativeConfig(max_tokens=4096))
    made = HostedEngine(engine, SIZES)
    yield made
    asyncio.run(made.close())


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


def check(urls: list[str], *settings: str, more: str = "") -> None:
    rollout = f"rollout={{engine: address, urls: [{', '.join(urls)}], key_env: {KEY_ENV}{more}}}"
    check_recipe(load_recipe("quickstart", [rollout, "warmup=null", "cluster.devices=cpu:2", *settings]))


def test_a_server_that_can_serve_the_run_passes(hosted: HostedEngine) -> None:
    with serving(hosted) as urls:
        check(urls)
        check(urls, "sampling.temperature=0.7")


def test_an_address_without_a_server_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"no server of dialect 'interlace' answers at {url}.*Start it"):
        check([url])


def test_no_address_at_all_is_refused() -> None:
    with pytest.raises(UserError, match=r"needs servers: set rollout.urls"):
        check([])
    with pytest.raises(UserError, match=r"rollout.urls: 'localhost:80' is not the address of a server: write http://"):
        check(["localhost:80"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"http://a:1\nhttp://b:1\nhttp://a:1\n", "has http://a:1 twice. Name each server once"),
        (b"http://a:1\na:2\n", "'a:2' is not the address of a server: write http://HOST:PORT"),
        (b"# no address yet\n", "has no address. Write one address a line into it, or set rollout.urls"),
        (b"\xff\xfe", "is not text in UTF-8"),
    ],
)
def test_a_file_of_addresses_with_a_mistake_is_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    """A line that was written twice was taken once, and a malformed one was not found by its file."""
    file = tmp_path / "urls"
    file.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"rollout.urls_file = '{file}'") + f".*{re.escape(sentence)}"):
        check([], more=f", urls_file: {file}")
    with pytest.raises(UserError, match=r"rollout\.urls has http://a:1 twice"):
        check(["http://a:1", "http://a:1"])


def test_a_wrong_key_is_named(hosted: HostedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(hosted) as urls:
        monkeypatch.setenv(KEY_ENV, "another")
        with pytest.raises(UserError, match=f"{urls[0]}.* answered 401.*rollout.key_env"):
            check(urls)
    monkeypatch.delenv(KEY_ENV)
    with pytest.raises(UserError, match="the environment has no such variable"):
        check(["http://127.0.0.1:1"])


def test_an_address_of_ipv6_is_known() -> None:
    with pytest.raises(UserError, match=r"no server of dialect 'interlace' answers at http://\[::1\]:9"):
        check(['"http://[::1]:9"'])


def test_a_dialect_that_does_not_match_is_named(hosted: HostedEngine) -> None:
    with serving(hosted) as urls, pytest.raises(UserError, match=f"{urls[0]}.* 404.*rollout.dialect"):
        check(urls, more=", dialect: vllm")
    with pytest.raises(UserError, match="unknown dialect"):
        check(["http://127.0.0.1:1"], more=", dialect: vlm")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, "a vocabulary of 300 tokens, and the recipe's model has 262"),
        ({"context": 8}, "sequences of at most 8 tokens"),
        ({"dtype": "bfloat16"}, "serves bfloat16 weights, and model.dtype is float32.*off_policy.correction"),
    ],
)
def test_another_model_is_named(
    hosted: HostedEngine, changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "_capacity", replace(SIZES, **changes))  # type: ignore[arg-type]
    with serving(hosted) as urls, pytest.raises(UserError, match=f"{urls[0]}.*{message}"):
        check(urls)


def test_another_type_of_weights_passes_if_the_algorithm_corrects_for_it(
    hosted: HostedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "_capacity", replace(SIZES, dtype="bfloat16"))
    with serving(hosted) as urls:
        check(urls, "algorithm.off_policy.proximal=recomputed", "algorithm.off_policy.correction=truncate")


def test_two_addresses_of_one_server_are_refused(hosted: HostedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "_capacity", replace(SIZES, identity="one"))
    with serving(hosted, 2) as urls:
        with pytest.raises(UserError, match=f"{urls[0]} and {urls[1]} are one server"):
            check(urls)
        port = urls[0].rpartition(":")[2]
        with pytest.raises(UserError, match="are one server"):
            check([urls[0], f"http://localhost:{port}"])


def test_a_server_without_log_probs_is_refused(hosted: HostedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(requests: object, on_delta: object) -> None:
        from interlace.core.types import FinishReason

        on_delta(requests[0].id, Delta(token_ids=[1], finish_reason=FinishReason.LENGTH))  # type: ignore[index, operator]

    monkeypatch.setattr(hosted, "generate", generate)
    with serving(hosted) as urls, pytest.raises(UserError, match=f"{urls[0]}.*1 token ids and 0 log-probs"):
        check(urls)


def test_a_reference_that_is_no_service_is_refused() -> None:
    with pytest.raises(UserError, match=r"reference.service = 'native' is not a service"):
        check_recipe(load_recipe("quickstart", ["reference.service=native", "cluster.devices=cpu:2"]))


def test_a_reference_service_gives_log_probs_at_temperature_one(hosted: HostedEngine) -> None:
    with serving(hosted) as urls:
        service = f"reference.service={{engine: address, urls: [{urls[0]}], key_env: {KEY_ENV}}}"
        check_recipe(load_recipe("quickstart", [service, "algorithm.kl_coefficient=0.1", "cluster.devices=cpu:2"]))
        warm = [service, "algorithm.kl_coefficient=0.1", "sampling.temperature=0.7", "cluster.devices=cpu:2"]
        with pytest.raises(UserError, match=r"log-probs at temperature 1, and sampling.temperature is 0.7"):
            check_recipe(load_recipe("quickstart", warm))


def test_a_reference_whose_server_serves_trained_weights_is_refused(hosted: HostedEngine, tmp_path: Path) -> None:
    """A run that used the server as an engine left its last version there."""
    load_model(ModelConfig(path="tiny:micro")).model.save_pretrained(tmp_path)
    with serving(hosted) as urls:
        service = f"reference.service={{engine: address, urls: [{urls[0]}], key_env: {KEY_ENV}}}"
        settings = [service, "algorithm.kl_coefficient=0.1", "cluster.devices=cpu:2"]
        rollout = f"rollout={{engine: address, urls: [{urls[0]}], key_env: {KEY_ENV}}}"
        with pytest.raises(UserError, match=rf"{urls[0]} is also in rollout.urls"):
            check_recipe(load_recipe("quickstart", [*settings, rollout]))
        thread = LoopThread("client")
        thread.run(hosted.load(tmp_path, 3, "recompute"))
        thread.close()
        with pytest.raises(UserError, match=rf"{urls[0]} serves version 3 of weights that a run has loaded"):
            check_recipe(load_recipe("quickstart", settings))
