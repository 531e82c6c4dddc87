"""Cost of a checkpoint to a run: training waits for the copy to the host, and the disk is written concurrently.

A trained model with moments on 1 and on 2 ranks of the local cluster. A run waits for `copy` at a step boundary;
`write` overlaps with the next steps. With a synchronous checkpoint, as in most trainers, the run would wait for both.
--folder chooses the disk; files are flushed to it, as in a run.

    python benchmarks/checkpoint.py [--hidden 512] [--layers 8] [--rounds 3] [--json checkpoint.json]
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.runtime.local.cluster import LocalCluster
from interlace.runtime.worker import WorkerContext, WorkerSpec
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from interlace.workers.actor import ActorWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from interlace.engines.train import TrainEngine

VOCABULARY = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Medians over the rounds."""

    ranks: int
    mebibytes: float
    """Size of the checkpoint."""
    copy_s: float
    write_s: float
    updates_meanwhile: float
    """Optimizer updates during the write."""


class BareActor(ActorWorker):
    """Actor without a tokenizer."""

    def __init__(self, context: WorkerContext, hidden: int, layers: int) -> None:
        super().__init__(context, partial(make_engine, hidden, layers))


def make_engine(hidden: int, layers: int, context: WorkerContext) -> "tuple[TrainEngine, PreTrainedTokenizerBase]":
    """Returns an engine with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from interlace.engines.train import OptimizerConfig, TrainConfig, TrainEngine, sft_loss
    from interlace.engines.train.config import TrainedConfig
    from interlace.engines.train.place import join_ranks

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    engine = TrainEngine(
        Qwen2ForCausalLM(config),
        loss=sft_loss,
        optimizer=OptimizerConfig(),
        config=TrainConfig(),
        ranks=join_ranks(context, TrainedConfig()),
    )
    no_tokenizer: Any = None
    return engine, no_tokenizer


def samples() -> list[Sample]:
    """Returns four short samples."""
    draw = np.random.default_rng(0)
    ids = draw.integers(3, VOCABULARY, (4, 24)).astype(np.int32)
    prompt = Prompt(uid="0", token_ids=ids[0, :8], text="", answer="")
    ones = np.ones(24, np.float32)
    return [
        Sample(key=SampleKey(i, 0), prompt=prompt, segments=(Segment(token_ids=ids[i]),), advantages=ones)
        for i in range(4)
    ]


async def measure(ranks: int, hidden: int, layers: int, rounds: int, root: Path) -> Row:
    """Measures one group of ranks that is saved several times."""
    devices = tuple(Device(index=i, pool="cpu", pool_index=i, memory_bytes=1 << 34) for i in range(ranks))
    cluster = LocalCluster(devices, Schedule(), hang_after_s=600)
    try:
        return await cluster.run(_measure(cluster, ranks, hidden, layers, rounds, root))
    finally:
        await cluster.shutdown()


async def _measure(cluster: LocalCluster, ranks: int, hidden: int, layers: int, rounds: int, root: Path) -> Row:
    spec = WorkerSpec(
        name="actor",
        factory=partial(BareActor, hidden=hidden, layers=layers),
        worker_class=BareActor,
        devices=cluster.devices,
        num_ranks=ranks,
    )
    group = await cluster.launch(spec)
    copies, writes, updates, size = [], [], [], 0
    for number in range(rounds + 1):
        folder = root / f"{ranks}-{number}"
        await group.accumulate(samples())
        await group.optimizer_step()
        start = time.perf_counter()
        await group.copy_checkpoint()
        copied = time.perf_counter()
        writing = asyncio.ensure_future(_write(group, folder))
        done = 0
        while not writing.done():
            await group.accumulate(samples())
            await group.optimizer_step()
            done += 1
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder)
        if number:  # the first one is a warm-up
            copies.append(copied - start)
            writes.append(await writing - copied)
            updates.append(done)
    medians = [statistics.median(values) for values in (copies, writes, updates)]
    return Row(ranks=ranks, mebibytes=size / 2**20, copy_s=medians[0], write_s=medians[1], updates_meanwhile=medians[2])


async def _write(group: Any, folder: Path) -> float:
    """Returns the time at which the checkpoint was on the disk."""
    await group.write_checkpoint(folder)
    await asyncio.to_thread(_sync, folder)
    return time.perf_counter()


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=given.folder) as root:
        for ranks in (1, 2):
            rows.append(asyncio.run(measure(ranks, given.hidden, given.layers, given.rounds, Path(root))))
    print("ranks     MiB  copy s  write s  waited for if written at once  updates meanwhile")
    for row in rows:
        ratio = (row.copy_s + row.write_s) / row.copy_s
        print(
            f"{row.ranks:5d}  {row.mebibytes:6.0f}  {row.copy_s:6.3f}  {row.write_s:7.3f}  "
            f"{row.copy_s + row.write_s:8.3f} s, {ratio:4.1f} times as long  {row.updates_meanwhile:17.0f}"
        )
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
