"""One policy update, against the bare model and TRL: tokens per second, in one process, alternately.

The training half of a GRPO step on given samples is measured: forward, loss, backward, clipping, AdamW. Generation and
scoring are left out, and so are TRL's data loading and logging.

- `bare`: forward and backward of a plain copy of the model on the same number of tokens in rows of one length, and the
  same optimizer step. No loss, no padding: the cost of the model itself. With long-tailed lengths its rows have the
  mean length, so its attention does less work than any exact one.
- `interlace`: `TrainEngine.accumulate` and `optimizer_step` with GRPO's loss. It computes a group's prompt once, which
  neither of the others does; tokens per second count the prompt eight times for all of them.
- `trl`: the loss of TRL's GRPOTrainer on its padded batch, backward, the same optimizer step (if TRL is installed).

`--case tree` measures samples whose eight branches of 64 tokens follow 256 shared tokens, a prompt and a first turn.

- `alone`: each branch as a sample with all its tokens, as without a tree; the shared turn is trained on in the first of
  each eight.
- `tree`: the same tokens as trees, each token once.

Contenders alternate, so a ratio compares neighbours in time. Ratios are of CPU seconds on one thread; the last two
columns are their lowest and highest value over the rounds.

    python benchmarks/train_step.py [--case single|tree|all] [--size tiny|small] [--rounds 7] [--json train_step.json]
"""

import argparse
import importlib.util
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from interlace.algorithms import create_algorithm
from interlace.core.types import PROMPT, Prompt, Sample, SampleKey, Segment
from interlace.engines.train import OptimizerConfig, TrainConfig, TrainEngine

if TYPE_CHECKING:
    from trl import GRPOTrainer

SAMPLES, GROUP, PROMPT_TOKENS, MEDIAN, LONGEST = 64, 8, 16, 64, 512
MICROBATCH_TOKENS, TRL_MICROBATCH = 4096, 16
VOCABULARY = 512
TREES, BRANCHES, SHARED, BRANCH_TOKENS = 4, 8, 256, 64
SIZES = {"tiny": (128, 4), "small": (384, 8)}
"""Hidden size and layers: 0.8 and 14 million parameters."""
CASES = {"single": ("uniform", "longtail"), "tree": ("tree",), "all": ("uniform", "longtail", "tree")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One contender at one length distribution."""

    size: str
    lengths: str
    contender: str
    tokens: int
    cpu_s: float
    """Median over the rounds."""
    tokens_per_cpu_s: float
    relative: float
    """Median over the rounds of (the first contender's seconds / this one's), on the same tokens."""
    relative_low: float
    relative_high: float


def build(size: str) -> PreTrainedModel:
    """Returns a model with the same weights every time."""
    torch.manual_seed(0)
    hidden, layers = SIZES[size]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=PROMPT_TOKENS + LONGEST,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config)


def response_lengths(kind: str) -> list[int]:
    """Returns lengths. uniform: all the median. longtail: lognormal around it, including the longest."""
    if kind == "uniform":
        return [MEDIAN] * SAMPLES
    draw = random.Random(0)
    lengths = [min(LONGEST, max(4, round(MEDIAN * np.exp(draw.gauss(0, 1))))) for _ in range(SAMPLES)]
    lengths[lengths.index(max(lengths))] = LONGEST
    return lengths


def make_samples(lengths: list[int]) -> list[Sample]:
    """Returns samples of random tokens, in groups of eight that answer one prompt."""
    draw = np.random.default_rng(0)
    token_ids = draw.integers(2, VOCABULARY, (SAMPLES // GROUP, PROMPT_TOKENS)).astype(np.int32)
    prompts = [Prompt(uid=str(gid), token_ids=row, text="", answer="") for gid, row in enumerate(token_ids)]
    return [
        Sample(
            key=SampleKey(index // GROUP, index % GROUP),
            prompt=prompts[index // GROUP],
            segments=(
                Segment(
                    token_ids=draw.integers(2, VOCABULARY, length).astype(np.int32),
                    logprobs=np.full(length, -np.log(VOCABULARY), np.float32),
                ),
            ),
            advantages=np.full(length, draw.normal(), np.float32),
        )
        for index, length in enumerate(lengths)
    ]


def make_trees() -> list[Sample]:
    """Returns trees, each a turn that eight branches continue; prompts differ."""
    draw = np.random.default_rng(0)

    def segment(parent: int, count: int) -> Segment:
        token_ids = draw.integers(2, VOCABULARY, count).astype(np.int32)
        return Segment(parent=parent, token_ids=token_ids, logprobs=np.full(count, -np.log(VOCABULARY), np.float32))

    trees = []
    for gid in range(TREES):
        token_ids = draw.integers(2, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
        segments = [segment(PROMPT, SHARED - PROMPT_TOKENS), *[segment(0, BRANCH_TOKENS) for _ in range(BRANCHES)]]
        trees.append(
            Sample(
                key=SampleKey(gid, 0),
                prompt=Prompt(uid=str(gid), token_ids=token_ids, text="", answer=""),
                segments=tuple(segments),
                advantages=np.full(sum(len(each.token_ids) for each in segments), draw.normal(), np.float32),
            )
        )
    return trees


def branches_alone(tree: Sample, *, apart: bool = True) -> list[Sample]:
    """Returns each branch as a separate sample; their prompts differ in a token. apart: False keeps them equal."""
    shared, *leaves = tree.segments
    found = []
    for index, leaf in enumerate(leaves):
        token_ids = tree.prompt.token_ids.copy()
        if apart:
            token_ids[0] = 2 + index
        first = shared if index == 0 else replace(shared, sampled=np.zeros(len(shared.token_ids), np.bool_))
        assert tree.advantages is not None
        found.append(
            replace(
                tree,
                key=SampleKey(tree.key.gid, index),
                prompt=replace(tree.prompt, uid=f"{tree.prompt.uid}/{index}", token_ids=token_ids),
                segments=(first, leaf),
                advantages=tree.advantages[: len(shared.token_ids) + len(leaf.token_ids)],
            )
        )
    return found


def bare_update(size: str, num_tokens: int) -> Callable[[], None]:
    """Returns an update of the model alone, on rows of one length."""
    model, width = build(size), round(num_tokens / SAMPLES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows = torch.randint(2, VOCABULARY, (SAMPLES, width)).split(max(1, MICROBATCH_TOKENS // width))

    def update() -> None:
        for part in rows:
            logits = model(part, use_cache=False).logits
            logits.backward(torch.full_like(logits, 1e-6))
        optimizer.step()
        optimizer.zero_grad()

    return update


def our_update(size: str, samples: list[Sample]) -> Callable[[], None]:
    """Returns an update of one minibatch through the train engine."""
    engine = TrainEngine(
        build(size),
        loss=create_algorithm("grpo", {}).loss,
        optimizer=OptimizerConfig(lr=1e-6),
        config=TrainConfig(tokens_per_microbatch=MICROBATCH_TOKENS),
    )

    def update() -> None:
        engine.accumulate(samples)
        engine.optimizer_step()

    return update


def trl_update(size: str, samples: list[Sample]) -> Callable[[], None]:
    """Returns an update with TRL, which pads to the longest of the batch and takes TRL_MICROBATCH samples at a time."""
    trainer = trl_trainer(size)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6, fused=True)
    longest = max(sample.num_tokens for sample in samples)
    ids, mask = torch.zeros(SAMPLES, longest, dtype=torch.long), torch.zeros(SAMPLES, longest, dtype=torch.long)
    for index, sample in enumerate(samples):
        ids[index, : sample.num_tokens] = torch.from_numpy(sample.token_ids)
        mask[index, : sample.num_tokens] = 1
    prompts = torch.from_numpy(np.stack([sample.prompt.token_ids for sample in samples])).long()
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor([float(sample.advantages[0]) for sample in samples]),
    }

    def update() -> None:
        for first in range(0, SAMPLES, TRL_MICROBATCH):
            part = {name: column[first : first + TRL_MICROBATCH] for name, column in batch.items()}
            part["num_items_in_batch"] = mask.sum()
            trainer._compute_loss(trainer.model, part).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def trl_trainer(size: str) -> "GRPOTrainer":
    """Returns TRL's own trainer, whose loss is called directly: it never generates."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {"<pad>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=TRL_MICROBATCH,
        gradient_accumulation_steps=SAMPLES // TRL_MICROBATCH,
        num_generations=8,
        max_completion_length=LONGEST,
        report_to=[],
        use_cpu=True,
        bf16=False,
        beta=0.0,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=build(size),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "w2 w3"}] * SAMPLES),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
    )
    trainer.current_gradient_accumulation_steps = SAMPLES // TRL_MICROBATCH
    return trainer


def measure(size: str, kind: str, rounds: int) -> list[Row]:
    """Measures the contenders of one case."""
    if kind == "tree":
        trees = make_trees()
        branches = [branch for tree in trees for branch in branches_alone(tree)]
        num_tokens = sum(sample.num_total_tokens for sample in branches)
        return compare(
            size, kind, num_tokens, {"alone": our_update(size, branches), "tree": our_update(size, trees)}, rounds
        )
    samples = make_samples(response_lengths(kind))
    num_tokens = sum(sample.num_total_tokens for sample in samples)
    contenders = {"bare": bare_update(size, num_tokens), "interlace": our_update(size, samples)}
    if importlib.util.find_spec("trl"):
        contenders["trl"] = trl_update(size, samples)
    return compare(size, kind, num_tokens, contenders, rounds)


def compare(
    size: str, kind: str, num_tokens: int, contenders: Mapping[str, Callable[[], None]], rounds: int
) -> list[Row]:
    """Measures all contenders alternately, after one unmeasured round. The others are compared with the first."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, update in contenders.items():
            start = time.process_time()
            update()
            seconds[name].append(time.process_time() - start)
    rows = []
    for name, taken in seconds.items():
        ratios = [first / own for first, own in zip(next(iter(seconds.values()))[1:], taken[1:], strict=True)]
        cpu_s = statistics.median(taken[1:])
        rows.append(
            Row(
                size=size,
                lengths=kind,
                contender=name,
                tokens=num_tokens,
                cpu_s=round(cpu_s, 4),
                tokens_per_cpu_s=round(num_tokens / cpu_s, 1),
                relative=round(statistics.median(ratios), 3),
                relative_low=round(min(ratios), 3),
                relative_high=round(max(ratios), 3),
            )
        )
    return rows


def main() -> None:
    """Runs a case and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="single")
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="also write the rows there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for kind in CASES[arguments.case] for row in measure(arguments.size, kind, arguments.rounds)]
    print(
        f"{'lengths':10}{'contender':12}{'tokens':>8}{'CPU s':>9}{'tokens/CPU s':>14}{'of first':>9}   lowest, highest"
    )
    for row in rows:
        figures = f"{row.tokens:8}{row.cpu_s:9.3f}{row.tokens_per_cpu_s:14.0f}{row.relative:9.2f}"
        print(f"{row.lengths:10}{row.contender:12}{figures}{row.relative_low:9.2f}{row.relative_high:9.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
