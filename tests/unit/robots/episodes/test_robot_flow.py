"""Runs of the recipe `robot-flow` at toy size: imitation by flow matching, then PPO or GRPO on the chain."""

from pathlib import Path

import pytest

from tests.support.training import metrics, run_recipe

DOT = (
    "model.robot={state_size: 2, state_tokens: 2, action_size: 1, chunk: 2, head: flow, layers: 1, flow: {steps: 3}}",
    "episode.features=[]",
    "episode.env={family: 'tests.support.dot_simulator:Dot', num_envs: 16, workers: 1}",
    "episode.env.settings={tasks: [near, far], horizon: 12}",
    "task.starts={instructions: [push the puck down, push the puck up], train_size: 64, heldout_size: 8}",
    "sampling.max_new_tokens=8",
    "warmup={steps: 80, batch_size: 32, optimizer: {lr: 3.0e-3}, experts: {episodes: 12, noise: [0.3]}}",
    "episode.reward=return",
    "episode.bootstrap=false",
    "steps=2",
    "prompts_per_step=8",
    "minibatches=1",
    "logging.loggers=[]",
    "cluster.devices=cpu:1",
    "cluster.threads_per_worker=1",
)
SLOW = pytest.mark.slow
PPO = ("samples_per_prompt=1", "model.robot.flow.sampler=sde")
GRPO = ("algorithm={name: grpo, drop_zero_variance: false}", "samples_per_prompt=2", "model.robot.flow.sampler=noise")


@pytest.mark.parametrize("learner", [pytest.param(PPO, id="ppo-sde"), pytest.param(GRPO, id="grpo-noise", marks=SLOW)])
def test_a_flow_policy_trains_in_the_same_flow(tmp_path: Path, learner: tuple[str, ...]) -> None:
    pytest.importorskip("gymnasium")
    settings = [*DOT, *learner, f"model.cache_dir={tmp_path}"]
    report = run_recipe("robot-flow", tmp_path, "run", settings)
    assert report.done_steps == 2
    for line in metrics(tmp_path, "run"):
        assert line["actor/logprob_gap"] < 1e-5, "trainer and rollout give the same log-probs"
        assert line["actor/grad_norm"] > 0
        assert line["env/success"] >= 0.3, "what the imitation taught is kept"
