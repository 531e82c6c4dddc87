"""A link to a server with the states of SGLang's: it takes over a server that a killed run left in any of them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from interlace.core.tasks import LoopThread
from interlace.core.types import NO_GROUP, FinishReason, Request, SampleKey, SamplingParams
from interlace.engines.rollout.config import ServedConfig
from interlace.engines.rollout.services.dialects.sglang import SGLangClient
from interlace.engines.rollout.services.link import ServerLink
from interlace.engines.rollout.services.protocol import Address
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from tests.support.sglang_server import StandIn

KEY = "key"
SETTINGS = ServedConfig(heartbeat_s=0.05, health_timeout_s=5.0, progress_s=60.0, start_s=60.0, probe_gap=0.05)


def request(num_tokens: int) -> Request:
    params = SamplingParams(max_new_tokens=num_tokens)
    return Request(uid="prompt", owner=SampleKey(NO_GROUP, 0), prompt_ids=[5], params=params)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Address of a stand-in in this process."""
    loaded, loop = load_model(ModelConfig(path="tiny:micro")), LoopThread("stand-in")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)

    async def start() -> web.AppRunner:
        server = StandIn(str(tmp_path), context=2048, key=KEY)
        runner = web.AppRunner(server.make_app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = loop.run(start())
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    loop.run(runner.cleanup())
    loop.close()


def connect(url: str) -> SGLangClient:
    return SGLangClient(Address(url=url, key=KEY), seed=0, own_stops=())


async def leave_request(url: str, folder: Path) -> None:
    """Leaves a server as a run does that is killed during an update, while a request of 1,000 tokens runs."""
    client, has_begun = connect(url), asyncio.Event()
    work = asyncio.create_task(client.generate([request(1000)], lambda *_: has_begun.set()))
    await has_begun.wait()
    await client.load(folder, 3, "keep")
    await client.pause("keep")
    work.cancel()
    await client.close()


def test_a_server_whose_run_was_killed_during_an_update_is_taken_over(url: str, tmp_path: Path) -> None:
    asyncio.run(leave_request(url, tmp_path))
    link = ServerLink(lambda: connect(url), SETTINGS)
    assert link.open().context == 2048
    link.send([request(4)])
    link.inbox.wait_for_ends([request(4).id], patience_s=30.0)
    [*deltas] = [delta for _, delta in link.inbox.take()]
    assert deltas[-1].finish_reason == FinishReason.LENGTH
    assert not link.lost
    link.close()


def test_a_server_without_its_memory_is_watched_and_wakes(url: str) -> None:
    link = ServerLink(lambda: connect(url), SETTINGS)
    link.open()
    link.change_sleep(sleeps=True)
    link.call(lambda client: asyncio.sleep(1.0))  # many health checks
    link.change_sleep(sleeps=False)
    link.send([request(4)])
    link.inbox.wait_for_ends([request(4).id], patience_s=30.0)
    assert not link.lost
    link.close()
