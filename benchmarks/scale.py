"""Cost of the controller by size: CPU time, events per second and memory, with many samples in flight.

    python benchmarks/scale.py [--sizes 64:1600 4096:100000] [--preset areal] [--profile] [--write]
    python benchmarks/scale.py --ranks 10 100 1000 [--profile] [--write]

Flow, stages, gate, batcher, dispatch and channels are the real ones. In the first table, workers only take virtual
time; a size is a number of devices and a number of samples in flight. In the second table the event loop, the calls and
their connections are real too: each rank is called over TCP on loopback and computes nothing; three quarters
are engines, the others are the ranks of one trainer. 25 samples are in flight for each rank. Each size runs in a
separate process, and the ranks in another, whose time does not count. An event is a callback of the event loop. Cost
that grows faster than the size shows in the column of a sample. --profile prints the functions that take the most time.
"""

import argparse
import asyncio
import cProfile
import gc
import json
import os
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from _page import write_table
from _scale_ranks import FinishingEngine, LoopbackCluster, QuickReward, QuickTrainer, make_trainer, rank_process

from interlace.data.stream import PromptStream
from interlace.flows.run import RoleGroups
from interlace.flows.steps import StepResult
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.simulate import SINGLE_TURN, Simulation, simulate
from interlace.forecast.virtual import Timed
from interlace.run.host import host
from interlace.run.launch import RoleWorker, role_spec
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.run.recipe.layout import find_needed_roles
from interlace.run.recipe.load import load_recipe
from interlace.runtime.sim.loop import VirtualLoop

SAMPLES_PER_PROMPT = 16
STEPS = 3
PER_RANK = 25
"""Samples in flight per rank of the second table."""
TOKENS = 2000
"""Tokens of a response of the second table."""
SIZES = ("64:1600", "256:6400", "1024:25600", "4096:1000", "4096:10000", "4096:100000")
HEADS = ("samples in flight", "CPU s", "CPU us per sample", "memory MiB")
RESULTS = Path(__file__).parent / "RESULTS.md"
MANY_FILES = 8192
"""Limit of open files with which 1,000 connections are possible."""


class Counter:
    """Number of callbacks that the event loop was asked to run."""

    def __init__(self) -> None:
        self.count = 0

    def install(self, loop_class: type[asyncio.BaseEventLoop]) -> None:
        """Counts from now on."""
        call_soon = loop_class.call_soon

        def count(loop: asyncio.BaseEventLoop, *args: object, **context: object) -> object:
            self.count += 1
            return call_soon(loop, *args, **context)  # type: ignore[arg-type]

        loop_class.call_soon = count  # type: ignore[method-assign,assignment]


def recipe_with(preset: str, in_flight: int) -> tuple[Recipe, int]:
    """Returns a recipe with about so many samples in flight, and their exact number."""
    settings = [f"schedule={preset}", f"samples_per_prompt={SAMPLES_PER_PROMPT}", "sampling.max_new_tokens=28672"]
    depth = load_recipe("quickstart", settings).schedule.resolved.depth
    prompts = max(1, round(in_flight / SAMPLES_PER_PROMPT / (1 + depth)))
    sizes = [f"prompts_per_step={prompts}", f"steps={STEPS + 2 * round(depth)}"]
    return load_recipe("quickstart", [*settings, *sizes]), round(prompts * SAMPLES_PER_PROMPT * (1 + depth))


def measure(
    size: int, in_flight: int, counter: Counter, run: Callable[[], int], profiler: cProfile.Profile | None
) -> dict[str, float]:
    """Measures a run in this process. run: returns the number of samples."""
    around: AbstractContextManager[object] = profiler or nullcontext()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s, before = time.process_time(), counter.count
    with around:
        num_samples = run()
    seconds, num_events = time.process_time() - began_s, counter.count - before
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024
    return {
        "size": size,
        "in_flight": in_flight,
        "samples": num_samples,
        "cpu_s": seconds,
        "sample_us": 1e6 * seconds / num_samples,
        "events_per_s": num_events / seconds,
        "events_per_sample": num_events / num_samples,
        "memory_mib": memory / 2**20,
    }


def measure_simulated(preset: str, devices: int, in_flight: int, profiler: cProfile.Profile | None) -> dict[str, float]:
    """Simulates one size in this process."""
    recipe, in_flight = recipe_with(preset, in_flight)
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=devices, num_prompts=65_536)
    counter = Counter()
    counter.install(VirtualLoop)
    return measure(devices, in_flight, counter, lambda: len(simulate(recipe, simulation).events), profiler)


def measure_real(preset: str, ranks: int, profiler: cProfile.Profile | None) -> dict[str, float]:
    """Runs the controller with so many ranks in this process. The start of the ranks does not count."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(MANY_FILES, hard), hard))
    recipe, in_flight = recipe_with(preset, PER_RANK * ranks)
    counter = Counter()
    counter.install(asyncio.BaseEventLoop)
    with rank_process() as port, asyncio.Runner() as runner:
        cluster, train = runner.run(start_run(recipe, ranks, port))
        gc.collect()
        row = measure(ranks, in_flight, counter, lambda: runner.run(train()), profiler)
        runner.run(cluster.shutdown())
    return row


class CountingObserver:
    """Counts samples that have ended."""

    def __init__(self) -> None:
        self.num_samples = 0

    async def on_step(self, result: StepResult) -> bool:
        """Counts the samples of a step, and continues."""
        self.num_samples += len(result.ended)
        return True


async def start_run(recipe: Recipe, ranks: int, port: int) -> tuple[LoopbackCluster, Callable[..., object]]:
    """Starts the ranks. Returns the cluster, and the function that trains and returns the number of samples."""
    profile = load_profile("qwen2.5-7b-h800")
    simulation = Simulation(profile=profile, num_devices=ranks, num_prompts=65_536)
    algorithm = Timed(algorithm_of(recipe))
    cluster = LoopbackCluster(simulation.devices, recipe.schedule.resolved, port=port)
    workers = {
        "rollout": RoleWorker(worker_class=FinishingEngine, factory=partial(FinishingEngine, length=TOKENS)),
        "reward": RoleWorker(worker_class=QuickReward, factory=QuickReward, on_host=True),
        "actor": RoleWorker(worker_class=QuickTrainer, factory=partial(make_trainer, costs=profile.actor)),
    }
    started = {}
    for role in [role for role in find_needed_roles(algorithm.needs) if role.name in workers]:
        places = cluster.place(role.name) if role.needs_device else [()]
        specs = [role_spec(role, number, devices, workers[role.name]) for number, devices in enumerate(places)]
        specs = [replace(spec, num_ranks=max(1, len(spec.devices))) for spec in specs]
        started[role.name] = [await cluster.launch(spec) for spec in specs]
    prompts = PromptStream(simulation.prompts(), recipe.seed)
    hosted = await host(cluster, recipe, RoleGroups.of(started), prompts, algorithm=algorithm, stand_in=SINGLE_TURN)

    async def train() -> int:
        observer = CountingObserver()
        await cluster.run(hosted.train(observer))
        return observer.num_samples + len(hosted.run.finish())

    return cluster, train


def table(first: str, rows: Sequence[dict[str, float]]) -> str:
    """Returns the rows as Markdown."""
    lines = [f"| {first} | {' | '.join(HEADS)} |", "| --- " * (1 + len(HEADS)) + "|"]
    for row in rows:
        cells = [f"{row[name]:,.0f}" for name in ("size", "in_flight", "cpu_s", "sample_us", "memory_mib")]
        lines.append(f"| {' | '.join(cells)} |")
    load = os.getloadavg()[2]
    return "\n".join([*lines, "", f"Mean load of the two cores in the last quarter of an hour: {load:.1f} processes."])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="DEVICES:IN_FLIGHT")
    parser.add_argument("--ranks", nargs="+", type=int, help="measures the real runtime with so many ranks")
    parser.add_argument("--preset", default="areal")
    parser.add_argument("--one", action="store_true", help="measures the size in this process, and prints JSON")
    parser.add_argument("--profile", action="store_true", help="prints the functions with the most time")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.one:
        profiler = cProfile.Profile() if given.profile else None
        row = (
            measure_real(given.preset, given.ranks[0], profiler)
            if given.ranks
            else measure_simulated(given.preset, *map(int, given.sizes[0].split(":")), profiler)
        )
        if profiler:
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)
        print(json.dumps(row))
        return
    sizes = [("--ranks", str(each)) for each in given.ranks] if given.ranks else [("--sizes", s) for s in given.sizes]
    rows = []
    for size in sizes:
        words = [sys.executable, __file__, "--one", *size, "--preset", given.preset]
        words += ["--profile"] if given.profile else []
        rows.append(json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print(rows[-1], flush=True)
    text = table("ranks" if given.ranks else "devices", rows)
    print(text)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if given.write:
        write_table(RESULTS, "ranks" if given.ranks else "scale", text)


if __name__ == "__main__":
    main()
