"""Real training runs of a robot at toy size."""

from collections.abc import Sequence
from pathlib import Path

from interlace.run.session import TrainReport
from tests.support.training import metrics, run_recipe, shared_cache

SMALL = (
    "steps=3",
    "prompts_per_step=4",
    "minibatches=2",
    "episode.env.settings.horizon=40",
    "task.starts.train_size=64",
    "task.starts.heldout_size=3",
    "logging.loggers=[]",
    "cluster.devices=cpu:2",
    "cluster.threads_per_worker=1",
    "evaluation.num_shown=0",  # the films of a run take as long as its training
)
DOT = (
    "model.robot.state_size=2",
    "model.robot.state_tokens=2",
    "model.robot.chunk=2",
    "model.robot.bins=16",
    "model.robot.low=[-1.0]",
    "model.robot.high=[1.0]",
    "model.robot.layers=1",
    "episode.features=[]",
    "episode.env.family=tests.support.dot_simulator:Dot",
    "episode.env.settings={tasks: [near, far], horizon: 12}",
    "episode.reward=success",
    "episode.bootstrap=false",
    "task.starts={instructions: [push the puck down, push the puck up], train_size: 64, heldout_size: 16}",
    "sampling.max_new_tokens=2",
    "warmup={steps: 120, batch_size: 32, optimizer: {lr: 3.0e-3}, experts: {episodes: 12, noise: [0.3]}}",
    "algorithm={name: grpo, drop_zero_variance: false}",
    "prompts_per_step=4",
    "samples_per_prompt=4",
    "steps=2",
)
"""Settings for the simulator of one moving dot."""
NEAR_DOT = (
    "episode.features=[]",
    "episode.env={family: 'tests.support.dot_simulator:Dot', num_envs: 8, settings: {tasks: [near], horizon: 12}}",
    "task.starts={instructions: [push the puck down], train_size: 64, heldout_size: 16}",
    "sampling.max_new_tokens=2",
    "prompts_per_step=8",
    "logging.loggers=[]",
    "cluster.devices=cpu:1",
    "cluster.threads_per_worker=1",
)
"""Settings for one task of the moving dot, on one device. The shape of the policy (model.robot) is not among them."""


def run(root: Path, name: str, overrides: Sequence[str] = (), **kwargs) -> TrainReport:
    settings = [*SMALL, shared_cache(), *overrides]
    return run_recipe("robot-cartpole", root, name, settings, **kwargs)


def assert_learned(report: TrainReport) -> None:
    """Asserts that a run has raised the success on held-out starts by more than 0.3."""
    assert report.before is not None and report.after is not None
    assert report.after.greedy_accuracy > report.before.greedy_accuracy + 0.3


def played(root: Path, name: str) -> list[dict[str, float]]:
    """Returns the metrics of each step, except those that depend on the simulators' clocks."""
    return [{key: v for key, v in line.items() if "second" not in key} for line in metrics(root, name)]
