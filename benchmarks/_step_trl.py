"""TRL's side of `end_to_end.py`: its GRPOTrainer with forced response lengths, one turn after another.

A logits processor forces the lengths: it bans the end token before a row's target and makes it certain there. A row
that ended is padded until the longest one ends, as `generate` does. With its continuous batching each request has its
target as max_new_tokens. On several ranks the trainer runs as `accelerate launch` would start it.

    python benchmarks/_step_trl.py FOLDER LENGTHS generate|continuous RANKS THREADS [MICROBATCH]

THREADS: threads per rank. MICROBATCH: samples of a rank in one forward pass; by default all of them.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _step_task import (
    LEARNING_RATE,
    LONGEST,
    SAMPLES,
    SAMPLES_PER_PROMPT,
    Block,
    answer,
    read_prompts,
    response_lengths,
    reward,
    tree_cpu_s,
    wait_for_turn,
)

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
BLOCKS = {"num_blocks": 256, "max_batch_tokens": 1088}
"""Settings of continuous batching, whose defaults take most of a CPU's memory."""


class Clock:
    """Counter of tokens and seconds in the current turn; generation is counted separately."""

    def __init__(self) -> None:
        self.step, self.left = 0, 0
        self.begin()

    def begin(self) -> None:
        """Starts a turn."""
        self.tokens = self.steps = 0
        self.generate_s = 0.0
        self.start_s, self.start_cpu_s = time.perf_counter(), tree_cpu_s()

    def block(self) -> Block:
        """Returns the turn until now."""
        wall_s, cpu_s = time.perf_counter() - self.start_s, tree_cpu_s() - self.start_cpu_s
        bins = {"generate": self.generate_s, "rest": wall_s - self.generate_s}
        return Block(steps=self.steps, tokens=self.tokens, wall_s=wall_s, cpu_s=cpu_s, bins=bins)

    def lengths(self, kind: str, count: int) -> list[int]:
        """Returns the lengths of this rank's samples in the current step."""
        return response_lengths(kind, self.step)[RANK * count : (RANK + 1) * count]


def force_generate(model: Any, kind: str, end: int, clock: Clock) -> None:
    """Wraps `generate` with forced lengths."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class Force(LogitsProcessor):
        def __init__(self, start: int, targets: torch.Tensor) -> None:
            self._start, self._targets = start, targets

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ends = self._targets <= input_ids.shape[1] - self._start + 1
            scores = scores.clone()
            scores[:, end] = torch.where(ends, 0.0, -torch.inf)
            if ends.any():
                scores[ends, :end] = scores[ends, end + 1 :] = -torch.inf
            return scores

    plain = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        start, ids = time.perf_counter(), kwargs["input_ids"]
        targets = torch.tensor(clock.lengths(kind, len(ids)))
        kwargs["logits_processor"] = LogitsProcessorList([Force(ids.shape[1], targets)])
        output = plain(*args, **kwargs)
        clock.generate_s += time.perf_counter() - start
        return output

    model.generate = generate


def force_continuous(model: Any, kind: str, clock: Clock) -> None:
    """Wraps `generate_batch` and its requests with forced lengths."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    submit, plain, targets = Manager.add_request, model.generate_batch, []

    def add_request(self: Any, input_ids: Any, request_id: Any = None, **kwargs: Any) -> Any:
        kwargs |= {"max_new_tokens": targets[int(request_id.split("_")[1]) % len(targets)], "eos_token_id": -1}
        return submit(self, input_ids, request_id=request_id, **kwargs)

    def generate_batch(inputs: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        targets[:] = clock.lengths(kind, len(inputs))
        output = plain(inputs, **kwargs)
        clock.generate_s += time.perf_counter() - start
        return output

    Manager.add_request, model.generate_batch = add_request, generate_batch


def make_trainer(folder: Path, kind: str, generation: str, microbatch: int, clock: Clock) -> Any:
    """Returns a GRPOTrainer for this rank's share of the samples."""
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    continuous = generation == "continuous"
    if continuous:
        force_continuous(model, kind, clock)
    else:
        force_generate(model, kind, tokenizer.eos_token_id, clock)

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if RANK == 0:
                answer([])
            if not next_turn(clock):
                raise SystemExit

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            clock.tokens += sum(response_lengths(kind, clock.step))
            clock.step, clock.steps, clock.left = clock.step + 1, clock.steps + 1, clock.left - 1
            if not clock.left:
                if RANK == 0:
                    answer([clock.block()])
                control.should_training_stop = not next_turn(clock)

    def scored(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        found = sorted(map(len, completion_ids))
        if found != sorted(clock.lengths(kind, len(found))):
            raise ValueError(f"lengths were not forced: {found}")
        return [reward(completion) for completion in completions]

    dataset = Dataset.from_list([{"prompt": prompt} for prompt in read_prompts(folder)])
    return GRPOTrainer(
        model=model,
        reward_funcs=scored,
        args=make_config(microbatch, continuous=continuous),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Turns()],
    )


def make_config(microbatch: int, *, continuous: bool) -> Any:
    """Returns a configuration of plain GRPO."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=SAMPLES // WORLD // microbatch,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=LONGEST,
        max_steps=1_000_000,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        beta=0.0,
        gradient_checkpointing=False,  # on by default, which only slows a small model
        disable_tqdm=True,
        learning_rate=LEARNING_RATE,
        temperature=1.0,
        use_transformers_continuous_batching=continuous,
        **({"transformers_continuous_batching_config": BLOCKS} if continuous else {}),
    )


def next_turn(clock: Clock) -> bool:
    """Waits for the next turn on all ranks. Returns False after the last."""
    import torch
    from torch import distributed

    steps = torch.tensor(wait_for_turn() if RANK == 0 else 0)
    if WORLD > 1:
        distributed.broadcast(steps, 0)
    clock.left = int(steps)
    clock.begin()
    return clock.left > 0


def main() -> None:
    """Runs the contestant. Rank 0 starts the other ranks as its child processes."""
    folder, kind, generation, num_ranks = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    if num_ranks > 1 and "RANK" not in os.environ:
        port = str(random.SystemRandom().randrange(20000, 60000))
        places = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        places |= {"ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": str(num_ranks)}
        for rank in range(1, num_ranks):
            own = os.environ | places | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            subprocess.Popen([sys.executable, *sys.argv], env=own, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | places | {"RANK": "0", "LOCAL_RANK": "0"})
    import torch

    torch.set_num_threads(int(sys.argv[5]))
    sys.stdout = sys.stderr
    microbatch = int(sys.argv[6]) if len(sys.argv) > 6 else SAMPLES // WORLD
    make_trainer(folder, kind, generation, microbatch, Clock()).train()


if __name__ == "__main__":
    main()
