"""CPU and memory of the controller for each sample of a run: contents as references against contents by value.

The path is the path of a run: an engine pool and the generation stage get responses from a rollout worker in a process,
the channel holds them while they wait, and two ranks of a reward and two of a trainer read them in granules of 64. The
engine draws nothing: each request finishes at once with `length` tokens, whose text has four letters each. All samples
of a round wait in the channel together, as those of an asynchronous run do; then the memory of the controller is read.

`by value` switches the store off in the rollout worker and gives every token its own advantage, which is the code
before references. The physical limit is one copy of a sample's content, as the memory of this machine copies it.

With `--turns 10`, a sample is an episode of ten turns, each with a tenth of the tokens. The controller needs the tokens
of each turn for the next one, and stores them when the episode ends.

    python benchmarks/data_plane.py [--samples 1500] [--length 8000] [--turns 1] [--rounds 3] [--json data_plane.json]
"""

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from _data_plane_ends import LETTERS_PER_TOKEN, Reader, make_rollout

from interlace.algorithms.advantages import per_token
from interlace.core import payload
from interlace.core.types import Prompt, Sample, SampleKey, SamplingParams
from interlace.rollouts.base import Outcome, Session
from interlace.rollouts.episodes.single_turn import SingleTurn
from interlace.rollouts.generate import GenerateStage
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.stream import ADMITTED, GENERATED
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.channel import Channel
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.worker import WorkerSpec
from interlace.schedule.schedule import Schedule
from interlace.workers.rollout import RolloutWorker

ARMS = ("by value", "by reference")
GRANULE = 64
GROUP = 8
PROMPT_TOKENS = 200
WARM_UP = 200
"""Samples of an uncounted round, so that modules are imported and memory is reserved."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Costs of one sample."""

    generated_ms: float
    """CPU milliseconds of the controller from the request until the sample is in the channel."""
    read_ms: float
    """CPU milliseconds of the controller from there until the sample has ended: two calls, and its release."""
    readers_ms: float
    """CPU milliseconds of the operations that read it."""
    kib: float
    """KiB of the controller's memory while the sample waits."""
    shared_kib: float
    """KiB of the memory that processes share."""
    wall_ms: float


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a round."""

    samples: int
    length: int
    """Tokens of a sample."""
    turns: int
    """Turns of a sample, of equal length."""

    @property
    def turn_tokens(self) -> int:
        """Tokens of a turn."""
        return self.length // self.turns


class Turns:
    """Episode whose turns continue each other."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        context, text = prompt.token_ids.tolist(), ""
        for _ in range(self._num_turns):
            turn = await session.generate(context)
            context += turn.token_ids.tolist()
            text += turn.text
        return Outcome(text=text)


def resident_kib() -> int:
    """Returns the memory of this process that no other process shares."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def shared_kib(cluster: Cluster) -> float:
    """Returns the size of the files in the run's folder of shared memory."""
    folder = cluster._folder  # type: ignore[attr-defined]
    return sum(file.stat().st_blocks for file in folder.path.iterdir()) / 2 if folder else 0.0


class Plane:
    """A rollout worker, two ranks of a reward and two of a trainer, each in a process."""

    def __init__(
        self, cluster: Cluster, pool: EnginePool, readers: WorkerGroup[Reader], sizes: Sizes, *, by_value: bool
    ) -> None:
        self._cluster, self._pool, self._readers = cluster, pool, readers
        self._params, self._by_value = SamplingParams(max_new_tokens=sizes.turn_tokens), by_value
        self._episode = SingleTurn() if sizes.turns == 1 else Turns(sizes.turns)
        self._num_groups = 0
        gc.collect()
        self._empty_kib = resident_kib()

    @classmethod
    async def start(cls, cluster: Cluster, sizes: Sizes, *, by_value: bool) -> "Plane":
        if by_value:
            payload.MIN_BYTES = 1 << 62
        readers = await cluster.launch(
            WorkerSpec(name="reader", factory=Reader, worker_class=Reader, devices=cluster.devices, num_ranks=2)
        )
        made = partial(make_rollout, length=sizes.turn_tokens, by_value=by_value)
        spec = WorkerSpec(
            name="rollout/0", factory=made, worker_class=RolloutWorker, devices=cluster.devices[:1], may_die=True
        )
        engine, schedule = await cluster.launch(spec), Schedule()
        pool = EnginePool(
            cluster,
            [engine],
            schedule,
            samples_per_step=GRANULE,
            expected_tokens=sizes.turn_tokens,
            on_suspended=lambda: None,
        )
        pool.start()
        return cls(cluster, pool, readers, sizes, by_value=by_value)

    async def round(self, num_samples: int) -> Cost:
        """Generates samples, lets them wait, and reads them."""
        channel = Channel[SampleKey, Sample]("samples", Sample, self._cluster.waits)
        stage = GenerateStage(
            self._cluster, self._pool, self._episode, self._params, channel,
            on_generated=lambda _: None, on_failed=lambda *_: False,
        )  # fmt: skip
        cursor = channel.subscribe("reader", GENERATED)
        wave = self._wave(num_samples)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for sample in wave:
            channel.open(sample.key, sample, ADMITTED)
        channel.close()
        stage.generate(wave)
        while cursor.num_ready < num_samples:
            await cursor.changed.wait(who="benchmark", what="samples")
        self._cluster.timeline.take()
        for start in range(0, num_samples, GROUP):
            keys = [sample.key for sample in wave[start : start + GROUP]]
            self._add_advantages(channel, keys)
        generated_s = time.process_time() - cpu_s
        gc.collect()
        kib, in_files_kib, cpu_s = resident_kib() - self._empty_kib, shared_kib(self._cluster), time.process_time()
        readers_s = 0.0
        while rows := cursor.lease(GRANULE):
            readers_s += sum(await self._readers.score(rows)) + sum(await self._readers.train(rows))
            cursor.acknowledge([row.key for row in rows])
            self._cluster.timeline.take()
        rows.clear()
        read_s = time.process_time() - cpu_s
        return Cost(
            generated_ms=generated_s / num_samples * 1e3,
            read_ms=read_s / num_samples * 1e3,
            readers_ms=readers_s / num_samples * 1e3,
            kib=kib / num_samples,
            shared_kib=in_files_kib / num_samples,
            wall_ms=(time.perf_counter() - wall_s) / num_samples * 1e3,
        )

    def _add_advantages(self, channel: Channel[SampleKey, Sample], keys: list[SampleKey]) -> None:
        rows = [channel.record(key) for key in keys]
        found = per_token(np.linspace(-1, 1, len(rows), dtype=np.float32), rows)
        for key, advantages in zip(keys, found, strict=True):
            channel.put(key, {"advantages": advantages.copy() if self._by_value else advantages})

    def _wave(self, num_samples: int) -> list[Sample]:
        wave = []
        for start in range(0, num_samples, GROUP):
            gid = self._num_groups
            self._num_groups += 1
            ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
            prompt = Prompt(uid=f"p{gid}", token_ids=ids, text="a question", answer="")
            wave += [
                Sample(key=SampleKey(gid, index), prompt=prompt) for index in range(min(GROUP, num_samples - start))
            ]
        return wave


async def measure(cluster: Cluster, sizes: Sizes, rounds: int, *, by_value: bool) -> list[Cost]:
    """Returns the costs of each round."""
    plane = await Plane.start(cluster, sizes, by_value=by_value)
    await plane.round(min(WARM_UP, sizes.samples))
    return [await plane.round(sizes.samples) for _ in range(rounds)]


def copy_ms(length: int) -> float:
    """Returns the milliseconds of one copy of a sample's content, to memory that is not in a cache."""
    content = np.ones(length * (8 + LETTERS_PER_TOKEN), np.uint8)
    targets = np.ones((512, len(content)), np.uint8)
    found = []
    for target in targets:
        start_s = time.perf_counter()
        target[:] = content
        found.append(time.perf_counter() - start_s)
    return statistics.median(found) * 1e3


def show(name: str, rounds: list[Cost]) -> dict[str, float]:
    """Prints the medians of a contestant with the range of its rounds."""
    values = {field: [asdict(each)[field] for each in rounds] for field in asdict(rounds[0])}
    cells = [f"{statistics.median(found):.3g} ({min(found):.3g} to {max(found):.3g})" for found in values.values()]
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return {field: statistics.median(found) for field, found in values.items()}


def measure_apart(name: str, given: argparse.Namespace) -> list[Cost]:
    """Measures one contestant in a new process, because memory that was freed may stay with a process."""
    names = ("samples", "length", "turns", "rounds")
    sizes = [word for size in names for word in (f"--{size}", str(getattr(given, size)))]
    command = [sys.executable, __file__, *sizes, "--only", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [Cost(**each) for each in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    """Measures both and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--length", type=int, default=8000)
    parser.add_argument("--turns", type=int, default=1, help="turns of a sample; the length is their sum")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=ARMS, help="print the costs of one contestant as JSON")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.only:
        sizes = Sizes(samples=given.samples, length=given.length, turns=given.turns)
        flow = partial(measure, sizes=sizes, rounds=given.rounds, by_value=given.only == ARMS[0])
        rounds = asyncio.run(run_on(ClusterConfig(devices="cpu:2"), Schedule(), flow))
        print(json.dumps([asdict(each) for each in rounds]))
        return
    print("| content | generated, ms | read, ms | readers, ms | controller, KiB | shared, KiB | wall, ms |")
    print("|---|---|---|---|---|---|---|")
    found: dict[str, object] = {name: show(name, measure_apart(name, given)) for name in ARMS}
    limit_ms = copy_ms(given.length)
    print(f"one copy of a sample's content: {limit_ms:.3g} ms")
    if given.json:
        given.json.write_text(json.dumps({**found, "copy_ms": limit_ms}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
