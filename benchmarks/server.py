"""Cost of the server compared with direct requests to the engine pool, and the rate of code runs in a sandbox.

    python benchmarks/server.py [--peer PYTHON] [--write] [--json server.json]

Requests run one after another, alternately over HTTP and to the pool, so that both have the same conditions. PYTHON is
the interpreter of an environment with transformers[serving]: its `transformers serve` then answers the same requests
with the same model, alternately with this server.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
from _page import write_table

from interlace.agents.sandbox.client import Sandbox
from interlace.agents.sandbox.config import SandboxConfig
from interlace.agents.server.app import SessionServer, serving
from interlace.core.types import SamplingParams
from interlace.engines.rollout import NativeEngine
from interlace.models.tiny import build_tiny
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.session import SessionLimits
from interlace.run.clusters.base import run_flow
from interlace.run.serve import PoolVisitors, TokenizerCodec
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule
from interlace.workers.rollout import RolloutBundle, RolloutWorker

PAGE = Path(__file__).parent / "RESULTS.md"
PARAMS = SamplingParams(max_new_tokens=8)
PROMPT = list(range(3, 60))
NUM_REQUESTS, NUM_RUNS = 200, 200
ASK = {"prompt": "one and one is two, and two and two is", "max_tokens": 8, "temperature": 1.0}
PEER_START_S = 120.0


async def visitors_of(cluster: Cluster) -> PoolVisitors:
    """Returns an engine with the tiny model, for clients from outside."""

    def bundle(_context: object) -> RolloutBundle:
        model, tokenizer = build_tiny("micro", seed=0)
        return RolloutBundle(engine=NativeEngine(model), tokenizer=tokenizer, stop_token_ids=())

    group = await cluster.start("rollout/0", RolloutWorker, bundle, on="0")
    pool = EnginePool(cluster, [group], Schedule(), samples_per_step=1, expected_tokens=8, on_suspended=lambda: None)
    pool.start()
    return PoolVisitors(cluster, pool, PARAMS, SessionLimits())


def server_of(visitors: PoolVisitors) -> SessionServer:
    """Returns the server in front of it."""
    _, tokenizer = build_tiny("micro", seed=0)
    return SessionServer(visitors=visitors, codec=TokenizerCodec(tokenizer), api_key="k")


@asynccontextmanager
async def transformers_serve(python: str, folder: str) -> AsyncIterator[str]:
    """Starts `transformers serve` on the model of a folder, and yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [python, "-m", "transformers.cli.transformers", "serve", folder, "--port", str(port)]
    settings = ["--device", "cpu", "--dtype", "float32", "--log-level", "error"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*serve, *settings]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + PEER_START_S
            while not await answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("transformers serve does not answer")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def answers(url: str) -> bool:
    """Returns whether a server responds; waits shortly if it does not."""
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        await asyncio.sleep(0.2)
        return False


async def beside_peer(cluster: Cluster, *, python: str) -> tuple[list[float], list[float]]:
    """Returns the seconds of each text completion by this server and by `transformers serve`, alternately."""
    ours, theirs = [], []
    waiting = cluster.waits.operation(who="benchmark", what="the other server")
    with waiting, tempfile.TemporaryDirectory() as folder:
        for part in build_tiny("micro", seed=0):
            part.save_pretrained(folder)
        visitors = await visitors_of(cluster)
        async with (
            serving(server_of(visitors)) as url,
            transformers_serve(python, folder) as peer,
            aiohttp.ClientSession(headers={"Authorization": "Bearer k"}) as http,
        ):
            for _ in range(NUM_REQUESTS):
                for address, seconds in ((url, ours), (peer, theirs)):
                    start = time.perf_counter()
                    async with http.post(f"{address}/v1/completions", json={**ASK, "model": folder}) as response:
                        found = await response.json()
                    seconds.append(time.perf_counter() - start)
                    assert found["usage"]["completion_tokens"] == ASK["max_tokens"], found
    return ours[20:], theirs[20:]


async def request_seconds(cluster: Cluster) -> tuple[list[float], list[float]]:
    """Returns the seconds of each request over HTTP, and to the pool."""
    visitors = await visitors_of(cluster)
    server = server_of(visitors)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8}}
    headers = {"Authorization": "Bearer k"}
    over_http, direct = [], []
    async with serving(server) as url, aiohttp.ClientSession(headers=headers) as http:
        for _ in range(NUM_REQUESTS):
            start = time.perf_counter()
            async with http.post(f"{url}/inference/v1/generate", json=body) as response:
                found = await response.json()
            over_http.append(time.perf_counter() - start)
            assert len(found["choices"][0]["token_ids"]) == 8
            start = time.perf_counter()
            async with visitors.session(None) as session:
                await session.generate(PROMPT)
            direct.append(time.perf_counter() - start)
    return over_http[20:], direct[20:]


async def sandbox_rates() -> tuple[float, float]:
    """Returns runs of code per second, one after another and four concurrently."""
    sandbox = await Sandbox.start(SandboxConfig(sandbox="available", runs_at_once=4))
    try:
        rates = []
        for at_once in (1, 4):
            start = time.perf_counter()
            for _ in range(NUM_RUNS // at_once):
                await asyncio.gather(*(sandbox.run("print(6 * 7)") for _ in range(at_once)))
            rates.append(NUM_RUNS / (time.perf_counter() - start))
        return rates[0], rates[1]
    finally:
        sandbox.close()


def peer_rows(ours: list[float], theirs: list[float]) -> list[str]:
    """Returns the lines of the comparison."""
    ratios = np.divide(theirs, ours)
    low, middle, high = np.percentile(ratios, [10, 50, 90])
    one, other = statistics.median(ours) * 1000, statistics.median(theirs) * 1000
    return [
        f"| completion of 8 tokens, this server, median | {one:.2f} ms |",
        f"| the same by `transformers serve`, median | {other:.1f} ms |",
        f"| ratio, pair by pair: median (10 to 90 %) | {middle:.1f} ({low:.1f} to {high:.1f}) |",
    ]


def table(over_http: list[float], direct: list[float], rates: tuple[float, float], peer: list[str]) -> str:
    """Returns the table."""
    differences = np.subtract(over_http, direct) * 1000
    low, middle, high = np.percentile(differences, [10, 50, 90])
    one, four = statistics.median(over_http) * 1000, statistics.median(direct) * 1000
    return "\n".join(
        [
            "| measured | value |",
            "|---|---|",
            f"| request over HTTP, median | {one:.2f} ms |",
            f"| the same to the engine pool, median | {four:.2f} ms |",
            f"| overhead of a request: median (10 to 90 %) | {middle:.2f} ms ({low:.2f} to {high:.2f}) |",
            *peer,
            f"| runs of code a second, one after another | {rates[0]:.0f} |",
            f"| runs of code a second, four at once | {rates[1]:.0f} |",
            "",
        ]
    )


def main() -> None:
    """Measures, prints, and writes if requested."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--peer", metavar="PYTHON", help="of an environment with transformers[serving]")
    options = parser.parse_args()
    over_http, direct = asyncio.run(run_flow(request_seconds, devices="cpu:1"))
    peer = []
    if options.peer:
        peer = peer_rows(*asyncio.run(run_flow(partial(beside_peer, python=options.peer), devices="cpu:1")))
    rates = asyncio.run(sandbox_rates())
    text = table(over_http, direct, rates, peer)
    print(text)
    found = {"over_http_s": statistics.median(over_http), "direct_s": statistics.median(direct), "runs": rates}
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if options.write:
        write_table(PAGE, "benchmarks/server.py", text)


if __name__ == "__main__":
    main()
