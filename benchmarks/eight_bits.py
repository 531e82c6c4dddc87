"""Decoding with weights in eight bits beside the model's own: python benchmarks/eight_bits.py [--model smollm2].

Both engines take turns on one thread; ratios are of tokens per CPU second, the median over the rounds and their range.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from interlace.core.types import SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model


def make_engine(model: str, weights: str, sequences: int) -> NativeEngine:
    """Makes one of the two engines."""
    config = NativeConfig(weights=weights, max_running=sequences, max_tokens=16384, draft_tokens=0)  # type: ignore[arg-type]
    return NativeEngine(load_model(ModelConfig(path=model)).model, config=config)


def rate(engine: NativeEngine, prompts: list[list[int]], params: SamplingParams) -> float:
    """Tokens per CPU second, prompts included in the time."""
    start = time.process_time()
    done = engine.generate(prompts, params)
    return sum(len(one.token_ids) for one in done) / (time.process_time() - start)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| sequences | int8 / model | model, tokens per CPU second |\n|---|---|---|")
    for count in given.sequences:
        prompts = [[int(token) for token in np.random.default_rng(i).integers(10, 250, 5)] for i in range(count)]
        params = SamplingParams(max_new_tokens=given.tokens)
        engines = {weights: make_engine(given.model, weights, count) for weights in ("model", "int8")}
        pairs = [{name: rate(engine, prompts, params) for name, engine in engines.items()} for _ in range(given.rounds)]
        ratios = sorted(pair["int8"] / pair["model"] for pair in pairs)
        own = statistics.median(pair["model"] for pair in pairs)
        print(f"| {count} | {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | {own:.0f} |")


if __name__ == "__main__":
    main()
