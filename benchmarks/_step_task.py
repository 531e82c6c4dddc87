"""Task of `end_to_end.py` for all contestants, and the lines that they exchange with it."""

import json
import os
import random
import string
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 8, 8
SAMPLES = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
PROMPT_TOKENS, MEDIAN, LONGEST, SHORTEST = 16, 64, 512, 4
RECIPE = "recipe.yaml"
NUM_PROMPTS = 4096
LEARNING_RATE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive steps, measured by one contestant."""

    steps: int
    tokens: int
    """Tokens of responses."""
    wall_s: float
    cpu_s: float
    """CPU seconds of the contestant's process and its descendants."""
    bins: dict[str, float]
    """Seconds by activity, as the contestant reports them."""


def response_lengths(kind: str, step: int) -> list[int]:
    """Returns [SAMPLES] target lengths of a step: the same set for each step, in another order.

    uniform: all the median. longtail: lognormal with sigma 1 around the median, including the longest.
    """
    if kind == "uniform":
        return [MEDIAN] * SAMPLES
    draw = random.Random(0)
    lengths = [min(LONGEST, max(SHORTEST, round(MEDIAN * 2.718281828 ** draw.gauss(0, 1)))) for _ in range(SAMPLES)]
    lengths[lengths.index(max(lengths))] = LONGEST
    return random.Random(step).sample(lengths, SAMPLES)


def reward(response: str) -> float:
    """Returns a value that differs between responses of equal length and is cheap to compute."""
    return float(len(response) % 2)


def score(response: str) -> float:
    """Scores a response as `reward` does, under the name that the recipe uses."""
    return reward(response)


def write_task(folder: Path) -> None:
    """Writes model, tokenizer and prompts for all contestants."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["<pad>", "<eos>", "<bos>", *string.digits, *"+-*/=() \n?.,:", *string.ascii_lowercase]
    words += [f"<w{index}>" for index in range(512 - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=PROMPT_TOKENS + LONGEST + 8,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    draw = random.Random(0)
    prompts = ["".join(draw.choices(string.digits + "+-*/=", k=PROMPT_TOKENS)) for _ in range(NUM_PROMPTS)]
    lines = [json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines))
    write_recipe(folder)


def write_recipe(folder: Path) -> None:
    """Writes the task as a recipe of interlace, on one core. JSON is valid YAML."""
    recipe = {
        "model": str(folder),
        "task": {"files": {"train": str(folder / "prompts.jsonl")}},
        "reward": {"name": "_step_task:score", "workers": 0},
        "algorithm": "grpo",
        "cluster": {"backend": "local", "devices": "cpu:1"},
        "steps": 1_000_000,
        "prompts_per_step": PROMPTS_PER_STEP,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "sampling": {"max_new_tokens": LONGEST},
        "optimizer": {"lr": LEARNING_RATE},
    }
    (folder / RECIPE).write_text(json.dumps(recipe))


def read_prompts(folder: Path) -> list[str]:
    """Reads the prompts that write_task() wrote."""
    return [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]


def tree_cpu_s() -> float:
    """Returns the CPU seconds of this process, of its descendants, and of ended processes that these waited for."""
    ticks, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    return sum(ticks[pid] for pid in ticks if _is_below(pid, os.getpid(), parents)) / os.sysconf("SC_CLK_TCK")


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid != root:
        if pid not in parents:
            return False
        pid = parents[pid]
    return True


def wait_for_turn() -> int:
    """Waits until the driver requests steps. Returns their number; 0 at the end."""
    line = sys.stdin.readline()
    return int(line) if line.strip() else 0


def answer(blocks: Sequence[Block]) -> None:
    """Sends the results of a turn to the driver; an empty list reports that the contestant is ready."""
    sys.__stdout__.write(json.dumps([asdict(block) for block in blocks]) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
