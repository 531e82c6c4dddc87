"""GRPO in interlace and in TRL: the same start, data, reward and sizes on the same machine, in turn, for several seeds.

The start is a model of 0.2 million parameters that has learned the form of an answer. Each contender is a folder with
the code that a user writes, and runs as a process of its own with the same number of threads. Its weights at the end
are judged by the same greedy decoding of the same held-out questions.

    python benchmarks/compare_trl.py [--steps 30] [--seeds 0 1 2] [--threads 1] [--json compare.json]

seconds per step: median of the steps, without the first. memory: the largest resident set of the process. lines: of the
files that a user writes, without comments and empty lines.
"""

import argparse
import ast
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

NUM_TRAIN, NUM_HELDOUT = 4096, 256
TEMPLATES = {
    "interlace": {
        "recipe.yaml": """
model: START
task: {files: {train: train.jsonl, heldout: heldout.jsonl}}
reward: {name: "my_reward:score", correct: 1.0, workers: 0}
algorithm: {name: grpo, clip_high: 0.28}
schedule: verl-colocated
steps: STEPS
seed: SEED
prompts_per_step: 16
samples_per_prompt: 8
tokens_per_microbatch: 8192
sampling: {max_new_tokens: 32}
optimizer: {lr: 3.0e-4, warmup_steps: 10}
rollout: {max_running: 128, max_tokens: 8192}
eval_every: 0
evaluation: {num_prompts: 1}
""",
        "my_reward.py": """
import re


def score(response, answer):
    found = re.findall(r"<answer>(.*?)</answer>", response)
    return float(found[-1:] == [answer])
""",
    },
    "trl": {
        "train.py": """
import re

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def score(completions, answer, **kwargs):
    found = [re.findall(r"<answer>(.*?)</answer>", text) for text in completions]
    return [float(each[-1:] == [right]) for each, right in zip(found, answer)]


tokenizer = AutoTokenizer.from_pretrained("START")
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("START", dtype="float32"),
    processing_class=tokenizer,
    reward_funcs=score,
    train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
    args=GRPOConfig(
        output_dir="out",
        max_steps=STEPS,
        seed=SEED,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=32,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        epsilon_high=0.28,
        learning_rate=3.0e-4,
        adam_beta2=0.95,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    ),
)
trainer.train()
trainer.save_model("out")
tokenizer.save_pretrained("out")
""",
    },
}
TIMED = """
import time
from transformers import TrainerCallback

class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        with open("steps.txt", "a") as file:
            file.write(f"{time.perf_counter()}\\n")

source = open("train.py").read().replace("trainer.train()", "trainer.add_callback(Steps()); trainer.train()")
exec(compile(source, "train.py", "exec"))
"""
"""Runs the user's script with a callback that writes the time of each step."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of a contender."""

    system: str
    seed: int
    step_s: float
    peak_mib: float
    accuracy: float


def main() -> None:
    """Runs all contenders in turn and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--start-steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_rows(folder)
        start = train_start(folder, options.start_steps)
        print(f"start: accuracy {evaluate(folder, start):.3f}", flush=True)
        results = []
        for seed in options.seeds:
            for system in TEMPLATES:
                results.append(run(folder, system, start, options.steps, seed, options.threads))
                print(results[-1], flush=True)
    print("| system | s per step | memory (MiB) | accuracy by seed | lines |\n|---|---|---|---|---|")
    for system in TEMPLATES:
        ours = [each for each in results if each.system == system]
        accuracies = ", ".join(f"{each.accuracy:.3f}" for each in ours)
        step_s = statistics.median(each.step_s for each in ours)
        peak_mib = max(each.peak_mib for each in ours)
        print(f"| {system} | {step_s:.3f} | {peak_mib:.0f} | {accuracies} | {lines(system)} |")
    if options.json:
        options.json.write_text(json.dumps({"results": [asdict(each) for each in results]}, indent=1))


def write_rows(folder: Path) -> None:
    """Writes distinct questions: digits to sort, `<` for ascending and `>` for descending."""
    draw, seen = random.Random(0), dict[str, str]()
    while len(seen) < NUM_TRAIN + NUM_HELDOUT:
        digits, way = "".join(draw.choices("0123456789", k=draw.randint(3, 7))), draw.choice("<>")
        seen[digits + way] = "".join(sorted(digits, reverse=way == ">"))
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in seen.items()]
    for name, part in (("train", rows[:NUM_TRAIN]), ("heldout", rows[NUM_TRAIN:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def train_start(folder: Path, steps: int) -> Path:
    """Trains the start of all contenders: quick guesses, and worked answers in a quarter of the rows."""
    changes = [f"steps={steps}", "task.demonstrations.settings.work_share=0.25", "eval_every=0"]
    _python(folder, CLI, "train", "sft", *changes, "--name", "start", "--quiet")
    return folder / "runs" / "start" / "checkpoints" / f"step_{steps}"


def run(folder: Path, system: str, start: Path, steps: int, seed: int, threads: int) -> Result:
    """Runs one contender in a folder of its own."""
    here = folder / f"{system}-{seed}"
    here.mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        (here / name).symlink_to(folder / name)
    for name, text in TEMPLATES[system].items():
        filled = text.replace("START", str(start)).replace("STEPS", str(steps)).replace("SEED", str(seed))
        (here / name).write_text(filled.lstrip())
    (here / "timed.py").write_text(TIMED)
    code = ["-c", CLI, "train", "recipe.yaml", "--quiet"] if system == "interlace" else ["timed.py"]
    peak_mib = _measured([sys.executable, *code], here, threads)
    if system == "interlace":
        rows = [json.loads(line) for line in (here / "runs/recipe/metrics.jsonl").read_text().splitlines()]
        times = [row["timing_s/step"] for row in rows]
        model = here / "runs" / "recipe" / "checkpoints" / f"step_{steps}"
    else:
        ends = [float(line) for line in (here / "steps.txt").read_text().split()]
        times = [later - earlier for earlier, later in itertools.pairwise(ends)]
        model = here / "out"
    step_s = statistics.median(times[1:] or times)
    return Result(system=system, seed=seed, step_s=step_s, peak_mib=peak_mib, accuracy=evaluate(folder, model))


CLI = "from interlace.cli.main import app; app()"
ROOT = Path(__file__).parents[1]


def evaluate(folder: Path, model: Path) -> float:
    """Returns the share of right held-out answers with greedy decoding."""
    recipe = folder / "judge.yaml"
    text = TEMPLATES["interlace"]["recipe.yaml"].replace("STEPS", "1").replace("SEED", "0")
    text = text.replace("START", str(model)).replace("num_prompts: 1", f"num_prompts: {NUM_HELDOUT}")
    for name in ("train.jsonl", "heldout.jsonl"):
        text = text.replace(f": {name}", f": {folder / name}")
    recipe.write_text(text)
    (folder / "my_reward.py").write_text(TEMPLATES["interlace"]["my_reward.py"].lstrip())
    code = "import sys, interlace; print(interlace.evaluate(sys.argv[1], recipe=sys.argv[2], quiet=True).metrics())"
    said = _python(folder, code, str(model), str(recipe))
    return float(ast.literal_eval(said.splitlines()[-1])["eval/accuracy_greedy"])


def lines(system: str) -> int:
    """Counts the lines that a user writes."""
    texts = TEMPLATES[system].values()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for text in texts for line in text.splitlines())


def _python(folder: Path, code: str, *words: str) -> str:
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=folder, env=_environment(2), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return done.stdout


def _measured(command: list[str], folder: Path, threads: int) -> float:
    """Runs a command and returns its largest resident set, in MiB."""
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=_environment(threads), stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit((folder / "log.txt").read_text()[-3000:])
    return usage.ru_maxrss / 1024


def _environment(threads: int) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    return os.environ | offline | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    main()
