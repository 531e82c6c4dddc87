"""Workers on devices with memory of their own, as GPUs have, are made there and offloaded until they are called."""

import asyncio
import threading
import time

import pytest

from interlace.core.errors import UserError
from interlace.core.sampling import SamplingParams
from interlace.core.state_parts import STATE
from interlace.core.types import NO_GROUP, FinishReason, Request, SampleKey
from interlace.engines.rollout.services.dialects import dialect_named
from interlace.engines.rollout.services.protocol import Address, Delta
from interlace.run.clusters.base import run_on
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.sections import ClusterConfig
from interlace.run.serve import ServeOptions, Serving, serve
from interlace.runtime import cluster as cluster_module
from interlace.runtime.cluster import Cluster
from interlace.runtime.watchdog import Watchdog
from interlace.runtime.worker import Worker, WorkerContext, operation
from interlace.schedule.schedule import Schedule


@pytest.fixture(autouse=True)
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats the CPU devices of this process as devices with memory of their own."""
    monkeypatch.setattr(cluster_module, "_has_own_memory", lambda device: True)


class LargeWorker(Worker):
    """A worker whose state takes several checks of the watchdog to unload."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.is_offloaded = False

    def offload(self) -> None:
        time.sleep(6 * Watchdog.LOOK_EVERY_S)
        self.is_offloaded = True


def test_the_first_offload_of_a_large_worker_is_no_stall() -> None:
    async def launch(cluster: Cluster) -> None:
        await cluster.start("large", LargeWorker, on="0")

    asyncio.run(run_on(ClusterConfig(), Schedule(), launch))


class TooLargeWorker(Worker):
    """A worker whose state exceeds the memory of each device."""

    ended = 0

    def memory_parts(self) -> dict[str, int]:
        return {STATE: 1 << 60}

    @operation(bin="train")
    def compute(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        TooLargeWorker.ended += 1


def test_a_group_that_is_too_large_for_its_device_ends_before_its_name_is_used_again() -> None:
    async def launch(cluster: Cluster) -> None:
        with pytest.raises(UserError, match=r"needs .* GiB on"):
            await cluster.start("joiner", TooLargeWorker, on="0")
        assert (TooLargeWorker.ended, cluster.groups) == (1, [])
        await cluster.start("joiner", Worker, on="0")

    asyncio.run(run_on(ClusterConfig(devices="cpu:1"), Schedule(), launch))


def test_a_server_answers_a_run_before_any_client_opened_a_session() -> None:
    """Requests at the engine routes hold no device, and the engine was offloaded after its start."""
    recipe = load_recipe("quickstart", ["cluster.devices=cpu:1"])
    stop, found, answers = asyncio.Event(), dict[str, str](), list[Delta]()
    loops: list[asyncio.AbstractEventLoop] = []
    ready = threading.Event()

    def on_ready(serving: Serving) -> None:
        loops.append(asyncio.get_running_loop())
        found.update(url=serving.url, key=serving.admin_key)
        ready.set()

    server = threading.Thread(
        target=lambda: serve(recipe, ServeOptions(port=0), on_ready=on_ready, stop=stop), daemon=True
    )
    server.start()
    assert ready.wait(60)

    async def request() -> None:
        address = Address(url=found["url"], key=found["key"])
        client = dialect_named("interlace").connect(address, seed=0, own_stops=())
        key, params = SampleKey(NO_GROUP, 0), SamplingParams(max_new_tokens=3)
        wanted = Request(uid="a", owner=key, prompt_ids=[5, 6], params=params)
        async with asyncio.timeout(60):
            await client.generate([wanted], lambda name, delta: answers.append(delta))
        await client.close()

    try:
        asyncio.run(request())
        assert sum(len(delta.token_ids) for delta in answers) == 3
        assert answers[-1].finish_reason is FinishReason.LENGTH
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        server.join(60)
