"""What the server costs over asking the engine pool, and how many runs of code a sandbox makes.

    python benchmarks/server.py [--write] [--json server.json]

Requests one after another, in turn over HTTP and to the pool, so that both meet the same machine.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import aiohttp
import numpy as np
from _page import write_table

from interlace.core.types import SamplingParams
from interlace.engines.rollout import NativeEngine
from interlace.episodes.server.app import SessionServer, serving
from interlace.jobs.serve import PoolVisitors, TokenizerCodec
from interlace.models.tiny import build_tiny
from interlace.recipes.clusters.base import run_flow
from interlace.runtime.cluster import Cluster
from interlace.sandbox.client import Sandbox
from interlace.sandbox.config import SandboxConfig
from interlace.schedule.schedule import Schedule
from interlace.stages.pool import EnginePool
from interlace.stages.session import SessionLimits
from interlace.workers.rollout import RolloutBundle, RolloutWorker

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
PARAMS = SamplingParams(max_new_tokens=8)
PROMPT = list(range(3, 60))
NUM_REQUESTS, NUM_RUNS = 200, 200


async def request_seconds(cluster: Cluster) -> tuple[list[float], list[float]]:
    """Seconds of each request over HTTP, and to the pool."""

    def bundle(_context: object) -> RolloutBundle:
        model, tokenizer = build_tiny("micro", seed=0)
        return RolloutBundle(engine=NativeEngine(model), tokenizer=tokenizer, stop_token_ids=())

    group = await cluster.start("rollout/0", RolloutWorker, bundle, on="0")
    pool = EnginePool(cluster, [group], Schedule(), samples_per_step=1, expected_tokens=8, on_suspended=lambda: None)
    pool.start()
    visitors = PoolVisitors(cluster, pool, PARAMS, SessionLimits())
    _, tokenizer = build_tiny("micro", seed=0)
    server = SessionServer(visitors=visitors, codec=TokenizerCodec(tokenizer), api_key="k")
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
    """Runs of code a second, one after another and four at once."""
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


def table(over_http: list[float], direct: list[float], rates: tuple[float, float]) -> str:
    """Writes the table."""
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
            f"| runs of code a second, one after another | {rates[0]:.0f} |",
            f"| runs of code a second, four at once | {rates[1]:.0f} |",
            "",
        ]
    )


def main() -> None:
    """Measures, prints, and writes where asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="put the table into docs/serving.md")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    over_http, direct = asyncio.run(run_flow(request_seconds, devices="cpu:1"))
    rates = asyncio.run(sandbox_rates())
    text = table(over_http, direct, rates)
    print(text)
    found = {"over_http_s": statistics.median(over_http), "direct_s": statistics.median(direct), "runs": rates}
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if options.write:
        write_table(PAGE, "benchmarks/server.py", text)


if __name__ == "__main__":
    main()
