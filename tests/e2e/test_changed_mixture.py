"""A callback changes the weights of a mixture's sources. A killed run resumes to the same draws and weights."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import interlace
from interlace.run.callbacks import StepInfo
from tests.support.training import REPOSITORY, equal_weights, final_weights, metrics, samples

PROGRAM = """
import os, signal, sys

import interlace
from tests.e2e.test_changed_mixture import change


def change_and_end(step):
    change(step)
    if step.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)


interlace.train("mixed.yaml", name="killed", callbacks=[change_and_end], quiet=True, schedule=sys.argv[1])
"""
RECIPE = """
model: tiny:micro
task: [{source: a.jsonl}, {source: b.jsonl}, {source: c.jsonl, weight: 0.1}]
reward: tests.support.reward_functions:size
steps: 8
checkpoint_every: 2
prompts_per_step: 4
samples_per_prompt: 2
sampling: {max_new_tokens: 4}
rollout: {max_running: 8, max_tokens: 512}
algorithm: {drop_zero_variance: false}
cluster: {devices: "cpu:2"}
"""


def change(step: StepInfo) -> None:
    step.log("weight_of_b", step.weights["b"])
    if step.step == 2:
        step.set_weights({"a": 0, "b": 3})
    if step.step == 3:
        step.set_weights({"c": 4})


def run_killed(folder: Path, schedule: str) -> None:
    """Trains in a process that kills itself after step 5."""
    command = [sys.executable, "-c", PROGRAM, schedule]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("schedule", ["verl-colocated", pytest.param("one-step-off", marks=pytest.mark.slow)])
def test_a_killed_run_draws_the_prompts_that_an_uninterrupted_one_draws(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed.yaml").write_text(RECIPE)
    for source in ("a", "b", "c"):
        rows = [json.dumps({"prompt": f"{source}{number}", "answer": ""}) for number in range(40)]
        (tmp_path / f"{source}.jsonl").write_text("\n".join(rows))
    interlace.train("mixed.yaml", name="whole", callbacks=[change], quiet=True, schedule=schedule)
    run_killed(tmp_path, schedule)  # the newest checkpoint is of step 4, after both changes
    interlace.train(name="killed", callbacks=[change], quiet=True, resume=True)
    whole, killed = ([row["prompt"] for row in samples(tmp_path / "runs", name)] for name in ("whole", "killed"))
    assert killed == whole
    changed = Counter(str(prompt)[0] for prompt in whole[4 * 8 :])
    assert not changed["a"] and changed["c"] > changed["b"] > 0
    assert [row["weight_of_b"] for row in metrics(tmp_path / "runs", "killed")] == [1.0, 1.0, *[3.0] * 6]
    if schedule == "verl-colocated":  # an asynchronous run generates the samples in flight again, by newer weights
        assert metrics(tmp_path / "runs", "killed") == metrics(tmp_path / "runs", "whole")
        assert samples(tmp_path / "runs", "killed") == samples(tmp_path / "runs", "whole")
        assert equal_weights(*[final_weights(tmp_path / "runs", name) for name in ("killed", "whole")])
