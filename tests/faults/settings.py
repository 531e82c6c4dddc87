"""Settings: unusable settings, names and models are refused before a run starts."""

import json
from collections.abc import Callable

from tests.faults.lab import Fault, Lab

REFUSED = {
    "optimizer.lr=nan": "optimizer.lr",
    "optimizer.lr=inf": "optimizer.lr",
    "optimizer.lr=-1": "optimizer.lr",
    "steps=-1": "steps",
    "steps=three": "steps",
    "prompts_per_step=0": "prompts_per_step",
    "prompts_per_step=1000000000": "prompts_per_step",
    "samples_per_prompt=0": "samples_per_prompt",
    "sampling.temperature=0": "temperature",
    "sampling.max_new_tokens=0": "max_new_tokens",
    "sampling.max_new_tokens=100000": "tokens",
    "model.dtype=float8": "dtype",
    "seed=-1": "seed",
    "keep_checkpoints=0": "keep_checkpoints",
    "promts_per_step=2": "Did you mean 'prompts_per_step'",
    "schedule=areel": "Did you mean 'areal'",
    "schedule.max_staleness=-1": "max_staleness",
    "algorithm=gpro": "unknown algorithm 'gpro'",
    "cluster.devices=cpu:0": "cpu:0",
    "cluster.devices=cuda:1": "cuda",
    "actor.ranks=64": "ranks",
    "rollout.max_tokens=1": "max_tokens",
    "reward.name=os:system": "os:system",
    "reward.name=gone:score": "gone",
    "model=no/such-model": "no/such-model",
    "optimizer.max_failed_updates=0": "max_failed_updates",
    "learning_rate=1e-5": "write optimizer.lr",
    "load_in_4bit=true": "actor.lora",
    "deepspeed=x": "actor.ranks",
    "optimizer=adamw": "AdamW is the only optimizer",
    "actor.lora=true": "write actor.lora.rank=",
    "algorithm=dpo": "the recipe sft, dpo",
    "schedule=async": "one-step-off",
    "episode=features": "unknown episode 'features'",
    "reward=rw.py:good": "rw:good",
    "reward=rw.good": "rw:good",
    "task=gsm8k": "openai/gsm8k",
    "cluster.devices=gpu": "Did you mean 'cuda'",
    "cluster.devices=cpu:9999": "CPU cores",
    "cluster.address=10.0.0.1": "host:port",
    "logging.loggers=[mlflow]": "pip install",
    "weights.codec=int8": "weights.codec=int8 samples from another distribution",
    "sampling.logit_bias=[[1, 2.0]]": "logit_bias",
}


def refuses(setting: str, word: str) -> Callable[[Lab], None]:
    def check(lab: Lab) -> None:
        lab.train(setting).refused(word)
        assert not (lab.folder / "runs" / "x").exists(), "it left a run behind"

    return check


def a_learning_rate_beyond_all_bounds(lab: Lab) -> None:
    lab.train("steps=8", "optimizer.lr=1e30").said(1, "updates of the actor were dropped", "last good weights")
    lab.train("steps=1", "optimizer.lr=1e-30", "--name", "y").passed()
    steps = sorted((lab.folder / "runs" / "x" / "checkpoints").glob("step_*"))
    first = (lab.folder / "runs" / "y" / "checkpoints" / "step_1" / "model.safetensors").read_bytes()
    assert (steps[-1] / "model.safetensors").read_bytes() == first, "the weights are not the last good ones"


def a_short_run_with_it(lab: Lab) -> None:
    lab.train("steps=1", "optimizer.lr=1e30").said(1, "all updates of the actor were dropped")


def a_warm_up_with_it(lab: Lab) -> None:
    lab.train("warmup.optimizer.lr=1e30").said(1, "updates of the warm-up were dropped")


def a_weight_that_is_not_a_number(lab: Lab) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = lab.newest / "model.safetensors"
    weights = load_file(path)
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, path, {"format": "pt"})
    (lab.newest / "manifest.json").unlink()  # a model of another program, as it were
    lab.train(f"model={lab.newest}", "warmup=null", "--name", "y").refused("logits are not finite", "contains NaN")


def a_vocabulary_that_is_too_small(lab: Lab) -> None:
    path = lab.newest / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 7}))
    lab.train(f"model={lab.newest}", "warmup=null", "--name", "y").refused("258 tokens", "7 embeddings")


def a_model_cut_short(lab: Lab) -> None:
    path = lab.newest / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    again = (f"model={lab.newest}", "warmup=null", "--name", "y")
    lab.train(*again).refused("It was damaged after it was written")
    (lab.newest / "manifest.json").unlink()  # as in another's folder
    lab.train(*again).refused("cannot be loaded")


def a_name_that_is_taken(lab: Lab) -> None:
    assert lab.newest.is_dir()
    lab.train().refused("exists already", "--resume", "--overwrite", "--name")


def another_run_by_resume(lab: Lab) -> None:
    assert lab.newest.is_dir()
    lab.resume("seed=7").refused("would make the resumed run another one")


def fewer_steps_than_there_are(lab: Lab) -> None:
    assert lab.newest.is_dir()
    lab.resume("steps=2").refused("has trained 4 already")


def a_folder_that_is_no_run(lab: Lab) -> None:
    thesis = lab.folder / "runs" / "x" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    lab.train("--overwrite").refused("not a run folder")
    assert thesis.read_text() == "years of work"


OTHERS: dict[str, Callable[[Lab], None]] = {
    "optimizer.lr=1e30": a_learning_rate_beyond_all_bounds,
    "optimizer.lr=1e30 for one step": a_short_run_with_it,
    "warmup.optimizer.lr=1e30": a_warm_up_with_it,
    "a weight that is NaN": a_weight_that_is_not_a_number,
    "a vocabulary smaller than the tokenizer's": a_vocabulary_that_is_too_small,
    "a model whose file is cut short": a_model_cut_short,
    "a name that is taken": a_name_that_is_taken,
    "another seed with --resume": another_run_by_resume,
    "fewer steps than trained": fewer_steps_than_there_are,
    "--overwrite of a folder that is no run": a_folder_that_is_no_run,
    "--resume of nothing": lambda lab: lab.resume().refused("no run 'x' to resume"),
    "--resume with --overwrite": lambda lab: lab.resume("--overwrite").refused("give one of them"),
    "a recipe that is missing": lambda lab: lab.cli("train", "gone.yaml").refused("gone.yaml"),
    "a recipe that is no YAML": lambda lab: lab.cli("train", "mine.yaml", text="a: [").refused("mine.yaml"),
}
FAULTS = [
    *(Fault(name=setting, check=refuses(setting, word)) for setting, word in REFUSED.items()),
    *(Fault(name=name, check=check) for name, check in OTHERS.items()),
]
