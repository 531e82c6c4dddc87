"""Decode speed of the native engine on a GPU, with and without compilation, for short and long contexts.

    python benchmarks/gpu_decode.py [--hidden 2048] [--layers 16] [--write benchmarks/RESULTS.md] [--json FILE]

The model is a Llama of random bfloat16 weights. The time of a step is the best of three: 64 steps are measured,
without the time of the prompts. `--device cpu` is for a test of this program: nothing is compiled there.
"""

import argparse
import gc
import json
import time
from pathlib import Path

import numpy as np
import torch
from _page import write_table

from interlace.core.types import SamplingParams
from interlace.engines.rollout.config import NativeConfig
from interlace.engines.rollout.engine import NativeEngine
from interlace.run.gpu_checks.results import build_llama

SHAPES = ((1, 3), (32, 3), (256, 3), (32, 2000))
"""Pairs of a batch and the tokens of each prompt."""
NUM_STEPS, ROUNDS = 64, 3


def measure_call(engine: NativeEngine, prompts: list[list[int]], tokens: int) -> float:
    """Returns the seconds in which each prompt gets a number of tokens."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_new_tokens=tokens))
    return time.perf_counter() - start_s


def measure_step(engine: NativeEngine, batch: int, length: int) -> float:
    """Returns the seconds of a decode step."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(ROUNDS):
        first, second = (draw.integers(3, 32_000, (batch, length)).tolist() for _ in range(2))
        prefill_s = measure_call(engine, first, 1)
        found.append((measure_call(engine, second, NUM_STEPS + 1) - prefill_s) / NUM_STEPS)
    return min(found)


def main() -> None:
    """Prints a table with a row for each batch and length, and a column for each form of the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="measure only the first ones")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    columns, shapes = [], SHAPES[: options.shapes]
    for compiles in (False, True):
        model = build_llama(hidden=options.hidden, layers=options.layers, dtype="bfloat16", device=options.device)
        config = NativeConfig(max_running=256, max_tokens=256 * 1024, draft_tokens=0, compile_model=compiles)
        engine = NativeEngine(model, config=config)
        columns.append([measure_step(engine, *shape) for shape in shapes])
        del engine, model
        gc.collect()
        torch.cuda.empty_cache()
    rows = [
        "| batch | tokens of a prompt | as it is: ms a step, tokens/s | compiled | ratio |",
        "|---|---|---|---|---|",
    ]
    for (batch, length), plain_s, compiled_s in zip(shapes, *columns, strict=True):
        cells = [f"{1000 * each:.2f}, {batch / each:,.0f}" for each in (plain_s, compiled_s)]
        rows.append(f"| {batch} | {length:,} | {' | '.join(cells)} | {plain_s / compiled_s:.2f} |")
    text = "\n".join(rows)
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"as_it_is": columns[0], "compiled": columns[1]}), encoding="utf-8")
    if options.write:
        write_table(options.write, "benchmarks/gpu_decode.py", text)


if __name__ == "__main__":
    main()
