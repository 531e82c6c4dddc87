"""Decoding with 8-bit weights against the model's own precision.

    python benchmarks/eight_bits.py [--model smollm2] [--write benchmarks/RESULTS.md]

Both engines alternate on one thread; ratios are of tokens per CPU second, with the median over the rounds and the
range.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from _page import write_table

from interlace.core.types import SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model

BEGIN, END = "<!-- benchmarks/eight_bits.py -->", "<!-- end of eight bits -->"


def make_engine(model: str, weights: str, sequences: int) -> NativeEngine:
    """Creates one of the two engines."""
    config = NativeConfig(weights=weights, max_running=sequences, max_tokens=16384, draft_tokens=0)  # type: ignore[arg-type]
    return NativeEngine(load_model(ModelConfig(path=model)).model, config=config)


def rate(engine: NativeEngine, prompts: list[list[int]], params: SamplingParams) -> float:
    """Returns the tokens per CPU second, including the time of prompts."""
    start = time.process_time()
    done = engine.generate(prompts, params)
    return sum(len(one.token_ids) for one in done) / (time.process_time() - start)


def main() -> None:
    """Prints the table, and writes it if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    parser.add_argument("--json", type=Path, help="also write the ratios there, by number of sequences")
    given = parser.parse_args()
    found = {}
    torch.set_num_threads(1)
    lines = ["| sequences | int8 / model | model, tokens per CPU second |", "|---|---|---|"]
    for count in given.sequences:
        prompts = [[int(token) for token in np.random.default_rng(i).integers(10, 250, 5)] for i in range(count)]
        params = SamplingParams(max_new_tokens=given.tokens)
        engines = {weights: make_engine(given.model, weights, count) for weights in ("model", "int8")}
        pairs = [{name: rate(engine, prompts, params) for name, engine in engines.items()} for _ in range(given.rounds)]
        ratios = sorted(pair["int8"] / pair["model"] for pair in pairs)
        found[count] = ratios
        own = statistics.median(pair["model"] for pair in pairs)
        lines.append(f"| {count} | {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | {own:.0f} |")
    table = "\n".join([*lines, "", f"{given.rounds} rounds of {given.tokens} tokens."])
    print(table)
    if given.write:
        write_table(given.write, "benchmarks/eight_bits.py", table)
    if given.json:
        given.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
