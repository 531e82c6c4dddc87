"""Robots: incompatible policies and simulators are refused by name; a missing renderer affects only videos."""

import json
from collections.abc import Callable

from tests.faults.lab import Fault, Lab
from tests.support.openvla_folder import openvla_folder

SMALL = (
    "steps=1", "prompts_per_step=2", "minibatches=1", "task.starts.train_size=8", "task.starts.heldout_size=1",
    "logging.loggers=[]", "cluster.devices=cpu:1", "--name", "x",
)  # fmt: skip
DOT = (
    "episode.env.family=tests.support.dot_simulator:Dot", "episode.features=[]",
    "episode.env.settings={tasks: [near], horizon: 4}",
)  # fmt: skip
DRIFT = (
    "episode.env.settings={tasks: ['tests.support.wrapped_gym:Drift-v0'], horizon: 4}", "episode.features=[]",
    "model.robot={state_size: 1, state_tokens: 1, action_size: 1, chunk: 1, bins: 8, layers: 1}",
)  # fmt: skip


def refuses(word: str, *settings: str) -> Callable[[Lab], None]:
    return lambda lab: lab.cli("train", "robot-cartpole", *SMALL, *settings).refused(word)


def a_policy_without_statistics(lab: Lab) -> None:
    openvla_folder(lab.folder / "policy")
    file = lab.folder / "policy" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "norm_stats": {}}))
    ended = lab.cli("train", "robot-cartpole", *SMALL, *DOT, f"model={{path: {lab.folder / 'policy'}}}")
    ended.refused("the policy has statistics of no data set", "norm_stats")


def an_environment_without_a_renderer(lab: Lab) -> None:
    lab.cli("train", "robot-cartpole", *SMALL, *DRIFT).said(0, "no videos", "NotImplementedError")


FAULTS = [
    Fault(
        name="continuous actions for an environment with choices",
        check=refuses("the policy's head gives continuous numbers", "model.robot.head=flow"),
    ),
    Fault(
        name="a camera that the environment does not render",
        check=refuses("render none with these settings", "model.robot.image_size=64"),
    ),
    Fault(name="a policy folder without statistics", check=a_policy_without_statistics),
    Fault(name="an environment without a renderer", check=an_environment_without_a_renderer),
]
