"""Runs of a mixture whose sources have different algorithms."""

import json
from pathlib import Path

import pytest

from interlace.core.types import FloatArray
from interlace.flows.run import PolicyRun
from interlace.stages.batches import Batch
from tests.e2e.test_ranks import assert_same
from tests.support.training import metrics, run_recipe

RECIPE = """
model: tiny:micro
reward: tests.support.reward_functions:size
steps: 2
prompts_per_step: 8
samples_per_prompt: 3
sampling: {max_new_tokens: 8}
rollout: {max_running: 8, max_tokens: 512}
optimizer: {lr: 1.e-3}
cluster: {devices: "cpu:2"}
logging: {loggers: []}
"""
OWN = {"a": "{name: rloo, aggregation: token_mean, kl_coefficient: 0.1}", "b": "maxrl"}


def train(root: Path, name: str, *overrides: str, resume: bool = False, stop_after: int | None = None) -> None:
    run_recipe(str(root / "mixed.yaml"), root, name, list(overrides), resume=resume, stop_after=stop_after)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for source in OWN:
        rows = [json.dumps({"prompt": f"{source} {number}", "answer": ""}) for number in range(8)]
        (tmp_path / f"{source}.jsonl").write_text("\n".join(rows))
    (tmp_path / "mixed.yaml").write_text(RECIPE)
    return tmp_path


def mixture(root: Path) -> str:
    """Returns the override of a task whose sources have their own algorithms."""
    sources = [f"{{source: {root / name}.jsonl, algorithm: {algorithm}}}" for name, algorithm in OWN.items()]
    return f"task=[{', '.join(sources)}]"


def test_advantages_of_a_source_are_those_of_a_run_of_its_algorithm(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[tuple[str, int], FloatArray] = {}
    publish = PolicyRun.publish

    async def record(self: PolicyRun, batch: Batch) -> None:
        for sample in [sample for group in batch.groups for sample in group.samples]:
            assert sample.advantages is not None
            found[sample.prompt.text, sample.key.index] = sample.advantages.copy()
        await publish(self, batch)

    monkeypatch.setattr(PolicyRun, "publish", record)
    train(root, "mixed", mixture(root), "steps=1")
    mixed = dict(found)
    assert len(mixed) == 24 and {text[0] for text, _ in mixed} == set(OWN)
    found.clear()
    for source, algorithm in OWN.items():
        train(root, source, f"task=[{{source: {root / source}.jsonl}}]", f"algorithm={algorithm}", "steps=1")
    assert all((found[key] == advantages).all() for key, advantages in mixed.items())
    assert sum(bool(advantages.any()) for advantages in mixed.values()) > 8
    assert {"source/a/reward", "source/b/reward", "actor/ref_kl"} <= set(metrics(root, "mixed")[0])


def test_ranks_micro_batches_and_a_resumption_train_as_one_rank(root: Path) -> None:
    own = (mixture(root), "minibatches=2")
    train(root, "one", *own)
    several = (*own, "actor.ranks=2", "tokens_per_microbatch=24")
    train(root, "several", *several, stop_after=1)
    train(root, "several", *several, resume=True)
    names = ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/clip_fraction", "actor/ref_kl")
    assert_same(root, "several", "one", names)
