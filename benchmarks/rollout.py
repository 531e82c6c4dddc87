"""Tokens per second of the native rollout engine, against `generate` and transformers' continuous batching.

One process, one thread, the same prompts, forced response lengths, temperature 1. The contestants alternate, so that a
ratio compares neighbours in time; rates are tokens per CPU second, and a ratio is the median over the rounds.

- `generate`: one padded batch; a row that ended is padded until the longest row ends.
- `continuous batching`: transformers' ContinuousBatchingManager with each request's own max_new_tokens.
- `share of the bound`: minimum time of a decode step of some rows, max(FLOPs / GEMM rate, bytes / memory bandwidth),
  both measured in this run, divided by its time. `outside`: the part of a decode step outside the model's forward pass.
  `--rows` chooses the numbers of rows; with `--workloads` and no name nothing else is measured. `--threads` are the
  decoder's in these steps; with two or more, times are of the wall clock instead of the CPU.

    python benchmarks/rollout.py [--model tiny|135m] [--median 64] [--rounds 5] [--against generate] [--json FILE]
"""

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from interlace.core.types import NO_GROUP, Request, SampleKey
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams

SAMPLES, PROMPT_TOKENS = 64, 16
PEERS = ("generate", "continuous batching")
RATIO = 8
"""Longest response divided by the median, in the long-tailed workload."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One workload."""

    workload: str
    tokens: int
    tokens_per_s: dict[str, float]
    """Median over the rounds, per CPU second."""
    ratio: dict[str, float]
    """interlace's rate divided by the contestant's, median of the rounds' ratios."""


def build(name: str) -> PreTrainedModel:
    """Returns a randomly initialised model."""
    torch.manual_seed(0)
    shared = {"tie_word_embeddings": True, "max_position_embeddings": 1024, "pad_token_id": 0,
              "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    if name == "tiny":
        config = Qwen2Config(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                             num_attention_heads=4, num_key_value_heads=2, **shared)  # fmt: skip
        return Qwen2ForCausalLM(config).eval()
    llama = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                        num_attention_heads=9, num_key_value_heads=3, **shared)  # fmt: skip
    return LlamaForCausalLM(llama).eval()


def lengths(workload: str, median: int) -> list[int]:
    """Returns the response tokens per sample; long-tailed is lognormal with sigma 1, cut at RATIO times the median."""
    if workload == "uniform":
        return [median] * SAMPLES
    draw = random.Random(0)
    found = [min(RATIO * median, max(4, round(median * draw.lognormvariate(0, 1)))) for _ in range(SAMPLES)]
    found[found.index(max(found))] = RATIO * median
    return found


def run_engine(engine: NativeEngine, prompts: list[list[int]], targets: list[int]) -> int:
    """Returns the number of generated tokens."""
    params = [SamplingParams(max_new_tokens=target) for target in targets]
    return sum(len(completion.token_ids) for completion in engine.generate(prompts, params))


def run_generate(model: PreTrainedModel, prompts: list[list[int]], targets: list[int]) -> int:
    """Returns the number of useful tokens: up to each row's target."""
    ids = torch.tensor(prompts)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(targets), min_new_tokens=max(targets),
                   do_sample=True, temperature=1.0, top_k=0, top_p=1.0)  # fmt: skip
    return sum(targets)


def run_continuous(model: PreTrainedModel, prompts: list[list[int]], targets: list[int]) -> int:
    """Adds requests one by one, each with its own length. Returns the number of tokens."""
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(targets))
    sizes = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=1088)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=sizes, warmup=False
    ) as manager:
        for number, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
            manager.add_request(prompt, request_id=f"r{number}", max_new_tokens=target, eos_token_id=-1)
        made, done = 0, 0
        while done < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                made, done = made + len(result.generated_tokens), done + 1
    return made


def measure(work: Callable[[list[int]], int], targets: list[int]) -> float:
    """Returns tokens per CPU second."""
    start = time.process_time()
    tokens = work(targets)
    return tokens / (time.process_time() - start)


def compare(name: str, workloads: list[str], median: int, rounds: int, peers: list[str]) -> list[Result]:
    """Measures the contestants alternately, after a short warm-up."""
    model = build(name)
    engine = NativeEngine(copy.deepcopy(model), config=NativeConfig(max_running=SAMPLES))
    print(engine.report())
    draw = random.Random(1)
    vocab = model.config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(SAMPLES)]
    batched = copy.deepcopy(model)
    results = []
    for workload in workloads:
        targets = lengths(workload, median)
        contestants: dict[str, Callable[[list[int]], int]] = {
            "interlace": lambda targets: run_engine(engine, prompts, targets),
            "generate": lambda targets: run_generate(model, prompts, targets),
            "continuous batching": lambda targets: run_continuous(batched, prompts, targets),
        }
        contestants = {who: work for who, work in contestants.items() if who not in PEERS or who in peers}
        rates: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for work in contestants.values():
            work([2] * SAMPLES)
        for _ in range(rounds):
            for contestant, work in contestants.items():
                rates[contestant].append(measure(work, targets))
        ours = rates["interlace"]
        results.append(
            Result(
                workload=workload,
                tokens=sum(targets),
                tokens_per_s={contestant: statistics.median(found) for contestant, found in rates.items()},
                ratio={
                    contestant: statistics.median(a / b for a, b in zip(ours, found, strict=True))
                    for contestant, found in rates.items()
                    if contestant != "interlace"
                },
            )
        )
    return results


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Decode steps of some rows, against the bound by the machine's GEMM rate and memory bandwidth."""

    rows: int
    gemm_gflops_per_s: float
    bandwidth_gb_per_s: float
    step_ms: float
    compute_ms: float
    """FLOPs / GEMM rate."""
    read_ms: float
    """Bytes of the weights / bandwidth."""
    share_of_bound: float
    """Larger of the two bounds, divided by step_ms."""
    outside_forward: float
    attention_share: float
    """Share of attention in the forward pass."""


def decode_steps(name: str, row_counts: list[int], steps: int, threads: int) -> list[Steps]:
    """Measures steps without speculation, so with as many tokens as rows."""
    model = build(name)
    weights = (
        sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
        + model.get_input_embeddings().weight.numel()
    )
    engine = NativeEngine(model, config=NativeConfig(max_running=SAMPLES, draft_tokens=0), num_threads=threads)
    torch.set_num_threads(1)  # the machine's rates are measured on one core
    return [_decode_steps(engine, weights, rows, steps, threads) for rows in row_counts]


def _decode_steps(engine: NativeEngine, weights: int, rows: int, steps: int, threads: int) -> Steps:
    for index in range(rows):
        prompt = [(index * 7 + place) % 512 for place in range(PROMPT_TOKENS)]
        params = SamplingParams(max_new_tokens=1000)  # no row ends
        engine.submit(Request(uid=f"b{rows}", owner=SampleKey(NO_GROUP, index), prompt_ids=prompt, params=params))
    engine.step()
    clock = time.process_time if threads == 1 else time.perf_counter
    flops, bandwidth, looks = [], [], list[tuple[float, int]]()
    wall_s = forward_s = attention_s = 0.0
    square = torch.randn(1024, 1024)
    block = torch.randn(16 * 2**20)
    for _ in range(5):
        flops.append(2 * 1024**3 / timed(lambda: square @ square))
        bandwidth.append(block.nbytes / timed(block.sum))
        engine.step()  # exclude the effect of the prefill on the caches
        engine.metrics()
        start, num_tokens = time.perf_counter(), 0
        while num_tokens < rows * steps // 5:
            begun_s, num_new = clock(), engine.step().num_new_tokens
            looks.append((clock() - begun_s, num_new))
            num_tokens += num_new
        wall_s += time.perf_counter() - start
        split = engine.metrics()
        forward_s, attention_s = forward_s + split["forward_s"], attention_s + split["attention_s"]
    engine.abort()
    step_s = statistics.median(spent_s * rows / num_new for spent_s, num_new in looks)
    compute_s, read_s = 2 * weights * rows / max(flops), 4 * weights / max(bandwidth)
    return Steps(
        rows=rows,
        gemm_gflops_per_s=max(flops) / 1e9,
        bandwidth_gb_per_s=max(bandwidth) / 1e9,
        step_ms=step_s * 1e3,
        compute_ms=compute_s * 1e3,
        read_ms=read_s * 1e3,
        share_of_bound=max(compute_s, read_s) / step_s,
        outside_forward=1 - forward_s / wall_s,
        attention_share=attention_s / forward_s,
    )


def timed(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Returns seconds, by default of the CPU."""
    start = clock()
    work()
    return clock() - start


def main() -> None:
    """Prints a table and writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "135m"], default="tiny")
    parser.add_argument("--rows", nargs="+", type=int, default=[4, SAMPLES])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workloads", nargs="*", choices=["uniform", "long tail"], default=["uniform", "long tail"])
    parser.add_argument("--median", type=int, default=64, help="response tokens; 16 keeps 135m within minutes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = 100 if arguments.model == "tiny" else 10
    bound = decode_steps(arguments.model, arguments.rows, steps, arguments.threads)
    for found in bound:
        print("".join(f"{key} {value:.3g}   " for key, value in asdict(found).items()))
    results = (
        compare(arguments.model, arguments.workloads, arguments.median, arguments.rounds, arguments.against)
        if arguments.workloads
        else []
    )
    for result in results:
        print(f"\n{arguments.model}, {result.workload}: {result.tokens} tokens in {SAMPLES} samples")
        for contestant, rate in result.tokens_per_s.items():
            ratio = f"   interlace is {result.ratio[contestant]:.2f}x" if contestant in result.ratio else ""
            print(f"  {contestant:22}{rate:10.0f} tokens per CPU second{ratio}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"steps": [asdict(one) for one in bound], "results": [asdict(one) for one in results]}, indent=1)
        )


if __name__ == "__main__":
    main()
