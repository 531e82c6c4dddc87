"""Cost of a publication: planning, writing, the pause of an engine, and bytes of a delta.

Each is compared with a reference: awex's planner on the same shards, a plain copy of memory, and weights in messages
that each engine copies. checkpoint-engine runs on no CPU. Pairs are measured one after the other, round by round; a
ratio is the median of the rounds' ratios, with the smallest and the largest.

    python benchmarks/weights.py [--scale 1.0] [--rounds 7] [--only PART ...] [--awex FOLDER] [--json F] [--write F]
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _page import write_table
from _weights_awex import awex_planner
from transformers import LlamaConfig, LlamaForCausalLM

from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train.export import list_named_weights
from interlace.runtime.process.frames import Assembler, Reply, encode
from interlace.runtime.process.shared import SharedArrays, SharedFolder
from interlace.weights.config import WeightsConfig
from interlace.weights.plan import Box, Shard, Side, make_plan
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Route, WeightRef
from interlace.weights.transports.shared_memory import MEMORY
from interlace.weights.writer import WeightWriter

TRAINERS, ENGINES, TENSORS = 32, 8, 1000
SOME = 30_000_000
"""Approximate number of elements for measuring deltas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A row of the table."""

    what: str
    ours: str
    beside: str
    ratio: str
    target: str


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of a model of 135M parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="planning, writing, stopping, deltas; all without this")
    parser.add_argument("--awex", type=Path, help="folder of an unpacked wheel of awex")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = _model(given.scale)
    parts: dict[str, Callable[[], Iterator[Line]]] = {
        "planning": lambda: _planning(given.rounds, given.awex, max(9, int(TENSORS * min(1.0, given.scale)))),
        "writing": lambda: _writing(model, given.rounds),
        "stopping": lambda: _stopping(model, given.rounds),
        "deltas": lambda: _deltas(model, given.rounds),
    }
    lines = [line for name in given.only or parts for line in parts[name]()]
    table = _table(lines)
    print(table)
    if given.json:
        given.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    if given.write:
        write_table(given.write, "benchmarks/weights.py", table)


def _table(lines: Sequence[Line]) -> str:
    head = ["| | interlace | reference | ratio | target |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(asdict(line).values())} |" for line in lines)])


def _model(scale: float) -> LlamaForCausalLM:
    """Returns a model with the shape of SmolLM2-135M, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=max(320, int(49152 * scale)),
        hidden_size=576 if scale > 0.5 else 64,
        intermediate_size=1536 if scale > 0.5 else 128,
        num_hidden_layers=30 if scale > 0.5 else 2,
        num_attention_heads=9 if scale > 0.5 else 2,
        num_key_value_heads=3 if scale > 0.5 else 1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def _planning(rounds: int, awex: Path | None, num_tensors: int) -> Iterator[Line]:
    for num_shapes in (9, num_tensors):  # a transformer has 9
        shapes = [(64 * (8 + 3 * number), 512 + number) for number in range(num_shapes)]
        names = [(f"layers.{number // 9}.{number % 9}", shapes[number % num_shapes]) for number in range(num_tensors)]
        writers, readers = _rows(names, TRAINERS), _rows(names, ENGINES)
        theirs = awex_planner(awex, writers, readers)

        def ours(writers: Side = writers, readers: Side = readers) -> object:
            return make_plan(writers, readers)

        calls = [ours, theirs] if theirs else [ours]
        times = _paired(calls, rounds, clock=time.process_time)
        plan = make_plan(writers, readers)
        moved = sum(move.num_bytes for move in plan.moves())
        needed = sum(shard.num_bytes for shards in readers for shard in shards)
        yield Line(
            what=f"planning {TRAINERS} to {ENGINES} ranks, {num_tensors} tensors of {num_shapes} shapes, CPU time",
            ours=f"{_ms(times[0])}; moved / needed = {moved / needed:.2f}",
            beside=f"awex {_ms(times[1])}" if theirs else "awex is not installed",
            ratio=_ratio(times[1], times[0]) if theirs else "",
            target="60 ms" if num_shapes == 9 else "",
        )


def _rows(names: Sequence[tuple[str, tuple[int, int]]], ranks: int) -> list[list[Shard]]:
    side: list[list[Shard]] = [[] for _ in range(ranks)]
    for name, shape in names:
        step = -(-shape[0] // ranks)
        for rank in range(ranks):
            first = min(rank * step, shape[0])
            box = Box((first, 0), (min(step, shape[0] - first), shape[1]))
            side[rank].append(Shard(name, shape, "bfloat16", box))
    return side


def _writing(model: LlamaForCausalLM, rounds: int) -> Iterator[Line]:
    weights = list_named_weights(model)
    size = sum(tensor.nbytes for tensor in weights.values())
    copies = {name: torch.empty_like(tensor).zero_() for name, tensor in weights.items()}
    count = iter(range(10_000))
    with closing(_writer("shared_memory")) as writer:

        def copy() -> None:
            for name, tensor in weights.items():
                copies[name].copy_(tensor)

        def write() -> None:
            writer.write(next(count), weights)

        write(), write()  # fill both slots
        times = _paired([write, copy], rounds)
    yield Line(
        what=f"writing {size / 1e6:.0f} MB into shared memory, hash included",
        ours=f"{_ms(times[0])}, {size / statistics.median(times[0]) / 1e9:.1f} GB/s",
        beside=f"memcpy {_ms(times[1])}",
        ratio=_ratio(times[1], times[0]),
        target="0.8 of memcpy",
    )


def _stopping(model: LlamaForCausalLM, rounds: int) -> Iterator[Line]:
    """Measures the pause of an engine in another process, and the whole time of a publication."""
    weights = list_named_weights(model)
    config = NativeConfig(max_running=4, max_tokens=4096)
    engine, other = (NativeEngine(_copied(model), config=config) for _ in range(2))
    folder = SharedFolder(MEMORY)
    sending, receiving = SharedArrays(folder.path, passes_on=False), SharedArrays(folder.path, passes_on=True)
    count = iter(range(10_000))
    written: list[WeightRef] = []
    arrived: list[Any] = []
    with closing(_writer("shared_memory")) as writer, closing(WeightReader()) as reader:

        def write() -> None:
            version = next(count)
            written.append(WeightRef(version=version, parts=(writer.write(version, weights),)))

        def take_in() -> None:
            ref = written[-1]
            with reader.open(ref) as read:
                engine.update_weights(read, ref.version, "keep", frozen=read.frozen)

        def send_in_message() -> None:
            arrived.clear()
            gathered = {name: tensor.clone() for name, tensor in weights.items()}
            message = b"".join(encode(Reply(number=1, value=gathered), sending))
            assembler, place = Assembler(receiving), 0
            while place < len(message):
                space = assembler.space
                part = message[place : place + len(space)]
                space[: len(part)] = part
                place += len(part)
                arrived.extend(reply.value for reply in assembler.received(len(part)))

        def take_in_copy() -> None:
            other.update_weights(arrived[0], 1, "keep")

        for warm in (write, take_in, write, take_in, send_in_message, take_in_copy):
            warm()
        times = _paired([write, take_in, send_in_message, take_in_copy], rounds)
        arrived.clear()
    folder.remove()
    yield Line(
        what="an engine stops to take a version in",
        ours=_ms(times[1]),
        beside=f"a copy {_ms(times[3])}",
        ratio=_ratio(times[3], times[1]),
        target="5 ms",
    )
    whole = [[a + b for a, b in zip(times[first], times[first + 1], strict=True)] for first in (0, 2)]
    yield Line(
        what="a whole publication, one engine in another process",
        ours=_ms(whole[0]),
        beside=f"through the controller {_ms(whole[1])}",
        ratio=_ratio(whole[1], whole[0]),
        target="",
    )


def _deltas(model: LlamaForCausalLM, rounds: int) -> Iterator[Line]:
    """Measures weights of a model in bfloat16 whose float32 masters move by up to a learning rate, as with Adam."""
    for lr, target in ((1e-6, "15 times fewer"), (1e-5, ""), (3e-4, "sent whole")):
        made = torch.Generator().manual_seed(0)
        masters: dict[str, torch.Tensor] = {}
        for name, tensor in list_named_weights(model).items():
            if sum(kept.numel() for kept in masters.values()) < SOME:  # a part has the same share of changes
                masters[name] = torch.randn(tensor.shape, generator=made) * 0.02
        with closing(_writer("object_store", "delta")) as writer, closing(WeightReader()) as reader:
            parts, times = [], []
            for version in range(min(rounds, 4)):
                start = time.perf_counter()
                part = writer.write(version, masters, served=torch.bfloat16)
                times.append(time.perf_counter() - start)
                with reader.open(WeightRef(version=version, parts=(part,))) as read:
                    same = all(torch.equal(read[name], tensor.bfloat16()) for name, tensor in masters.items())
                    assert same, "a delta loses nothing"
                parts.append(part)
                for tensor in masters.values():
                    tensor.add_(torch.rand(tensor.shape, generator=made).mul_(2).sub_(1), alpha=lr)
            whole = parts[0].num_bytes
            shares = [whole / part.num_bytes for part in parts[1:]]
            yield Line(
                what=f"bytes of a step at learning rate {lr:g}",
                ours=f"{parts[-1].codec}, {parts[-1].num_bytes / 1e6:.2f} MB, written in {_ms(times[1:])}",
                beside=f"whole {whole / 1e6:.1f} MB",
                ratio=f"{statistics.median(shares):.1f} ({min(shares):.1f} to {max(shares):.1f})",
                target=target,
            )


def _writer(transport: str, codec: str = "raw") -> WeightWriter:
    return WeightWriter(Route(transport=transport, config=WeightsConfig(transport=transport, codec=codec)))


def _copied(model: LlamaForCausalLM) -> LlamaForCausalLM:
    made = LlamaForCausalLM(model.config).eval()
    made.load_state_dict(model.state_dict())
    return made


def _paired(
    calls: Sequence[Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Returns the seconds of each call in each round; every round makes all calls."""
    times: list[list[float]] = [[] for _ in calls]
    gc.collect()
    for _ in range(rounds):
        for own, call in zip(times, calls, strict=True):
            start = clock()
            call()
            own.append(clock() - start)
    return times


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ms"


def _ratio(above: Sequence[float], below: Sequence[float]) -> str:
    found = [a / b for a, b in zip(above, below, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


if __name__ == "__main__":
    main()
