"""Whole runs whose trained roles have two ranks, at toy size."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from interlace.core.payload import StoredSegments
from interlace.core.types import Response
from interlace.rollouts.generate import GenerateStage
from tests.support.mixture import save_mixture
from tests.support.training import SMALL, equal_weights, final_weights, metrics, run, samples

TRAINED = ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/kl", "actor/ratio_mean", "actor/clip_fraction")


def assert_same(root: Path, ours: str, theirs: str, names: tuple[str, ...] = TRAINED) -> None:
    """The same samples, and the same training to the tolerance of sums in another order."""
    for one, other in zip(metrics(root, ours), metrics(root, theirs), strict=True):
        assert {name: one[name] for name in names} == pytest.approx(
            {name: other[name] for name in names}, abs=1e-5, rel=1e-5
        )
    tokens = [[(row["uid"], row["index"], row["token_ids"]) for row in samples(root, name)] for name in (ours, theirs)]
    assert tokens[0] == tokens[1]


def test_two_ranks_train_as_one_and_take_turns_with_one_at_a_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "one")
    assert run(tmp_path, "turns", ["actor.ranks=2"], stop_after=2).was_stopped
    checkpoint = tmp_path / "turns" / "checkpoints" / "step_2"
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert len(list((checkpoint / "optimizer").glob("rank-*-of-2.safetensors"))) == 2, "each rank wrote its own"
    run(tmp_path, "turns", resume=True)
    assert_same(tmp_path, "turns", "one")
    assert run(tmp_path, "back", stop_after=2).was_stopped
    run(tmp_path, "back", ["actor.ranks=2", "actor.reshard=false"], resume=True)
    assert_same(tmp_path, "back", "one")
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.slow  # six processes that import torch
def test_a_resumed_run_of_two_ranks_is_equal_to_one_that_never_stopped(tmp_path: Path) -> None:
    run(tmp_path, "whole", ["actor.ranks=2"])
    run(tmp_path, "stopped", ["actor.ranks=2"], stop_after=2)
    run(tmp_path, "stopped", ["actor.ranks=2"], resume=True)
    assert metrics(tmp_path, "stopped") == metrics(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path, "stopped"), final_weights(tmp_path, "whole"))


@pytest.mark.slow  # compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_ranks_with_compiled_layers_train_as_one_without(tmp_path: Path) -> None:
    run(tmp_path, "one", ["steps=2"])
    run(tmp_path, "compiled", ["steps=2", "actor.ranks=2", "actor.compile=true"])
    assert_same(tmp_path, "compiled", "one")


@pytest.mark.slow  # four processes that import torch
def test_ranks_that_share_layers_train_and_generate_as_one(tmp_path: Path) -> None:
    """Weights go from ranks that have parts of them to ranks that need other parts."""
    run(tmp_path, "one", ["steps=2"])
    spans = ["rollout.tensor_parallel_size=2", "schedule.placement.rollout={devices: all, devices_per_instance: 2}"]
    run(tmp_path, "shared", ["steps=2", "actor.tensor_parallel=2", *spans])
    assert_same(tmp_path, "shared", "one")


@pytest.mark.slow  # four processes that import torch
def test_long_responses_stay_with_the_ranks_that_drew_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[str] = []
    take = GenerateStage._take_response

    def record(stage: GenerateStage, response: Response) -> None:
        segments = response.segments
        received.extend([segments.content._path] if isinstance(segments, StoredSegments) else [])
        take(stage, response)

    monkeypatch.setattr(GenerateStage, "_take_response", record)
    long = ["steps=1", "samples_per_prompt=16", "minibatches=1", "warmup=null", "sampling.max_new_tokens=900"]
    spans = ["rollout.tensor_parallel_size=2", "schedule.placement.rollout={devices: all, devices_per_instance: 2}"]
    run(tmp_path, "apart", [*long, "actor.tensor_parallel=2", *spans])
    assert received, "some responses of an untrained model are long"
    assert not any(Path(path).exists() for path in received)
    rows = samples(tmp_path, "apart")
    assert len(rows) == 64 and all(len(row["token_ids"]) == row["num_tokens"] for row in rows)
    # The ranks of the actor read the tokens and the log-probs of the same sample.
    assert max(step["actor/logprob_gap"] for step in metrics(tmp_path, "apart")) < 1e-4


@pytest.mark.slow  # four processes that import torch
def test_ranks_that_deal_out_experts_train_as_one_for_an_engine_that_has_all(tmp_path: Path) -> None:
    settings = ["steps=3", "warmup=null", "optimizer.lr=1e-3", "minibatches=1"]
    settings.append(f"model={save_mixture(tmp_path / 'model')}")
    run(tmp_path, "one", settings)
    run(tmp_path, "dealt", [*settings, "actor.expert_parallel=2"])
    assert_same(tmp_path, "dealt", "one")
    # With one update a step what was sampled has the log-probs that the trainer finds, version after version.
    assert max(step["actor/logprob_gap"] for step in metrics(tmp_path, "dealt")) < 1e-5


@pytest.mark.slow  # eight processes that import torch
def test_every_trained_role_may_have_ranks(tmp_path: Path) -> None:
    """With a reference, proximal log-probs and several minibatches; weights are exported while training goes on."""
    # A critic learns from rewards that are all alike too, and lengths alone would make its returns all but constant.
    plain = [override for override in SMALL if not override.startswith(("algorithm", "reward.shaping"))]
    settings = ["algorithm=ppo", "algorithm.kl_coefficient=0.1", "critic.optimizer.lr=1e-3", "steps=3"]
    names = (*TRAINED, "critic/loss", "critic/grad_norm", "critic/explained_variance")
    run(tmp_path, "one", settings, base=plain)
    run(tmp_path, "two", [*settings, "actor.ranks=2", "critic.ranks=2", "critic.reshard=false"], base=plain)
    assert_same(tmp_path, "two", "one", names)


def train(folder: Path, name: str, *options: str) -> str:
    command = [sys.executable, "-c", "from interlace.cli.main import app; app()", "train", "quickstart", "--name", name]
    done = subprocess.run(
        [*command, *SMALL, "steps=3", "checkpoint_every=1", "warmup=null", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("layout", ["ranks", "tensor_parallel", "context_parallel"])
def test_the_command_runs_on_both_clusters_to_the_same_bits(tmp_path: Path, layout: str) -> None:
    for backend in ("local", "ray"):
        train(tmp_path, backend, f"cluster.backend={backend}", f"actor.{layout}=2")
    root = tmp_path / "runs"
    assert metrics(root, "local") == metrics(root, "ray")
    ours, theirs = final_weights(root, "local"), final_weights(root, "ray")
    assert all((ours[name] == theirs[name]).all() for name in ours)
