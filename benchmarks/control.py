"""PPO and SAC on gymnasium's classic control against Stable-Baselines3, at the same number of simulated steps.

interlace runs a robot's recipe: observations become prompts of a small transformer, and actions are tokens, one of two
for CartPole and a number from a normal distribution for Pendulum. Stable-Baselines3 uses its defaults and the settings
of its zoo. interlace uses the same discounts, and ten passes over each batch; Stable-Baselines3 makes twenty and ten.
Both are judged by their training episodes at the end: the mean return of the last 20, sampled as in training.

    python benchmarks/control.py [--task cartpole pendulum pendulum-sac] [--seeds 0 1 2] [--steps N]
        [--write docs/robots.md] [--json control.json]
"""

import argparse
import json
import resource
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from _page import write_table

from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train

LAST = 20
"""Number of last episodes in a run's result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A task, and the settings of both for it."""

    task: str
    recipe: str
    steps: int
    """Simulated steps."""
    overrides: tuple[str, ...] = ()
    """Overrides of the recipe."""
    theirs: Mapping[str, object]
    """Arguments of Stable-Baselines3's algorithm that its zoo sets."""
    algorithm: Literal["PPO", "SAC"] = "PPO"
    num_envs: int = 4
    """Environments of Stable-Baselines3."""


TASKS = {
    "cartpole": Control(
        task="CartPole-v1",
        recipe="robot-cartpole",
        steps=15_000,
        overrides=("epochs=10", "algorithm.gamma=0.98", "algorithm.lam=0.8"),
        theirs={
            "n_steps": 256, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "learning_rate": 1e-3,
        },
    ),
    "pendulum": Control(
        task="Pendulum-v1",
        recipe="robot-pendulum",
        steps=20_000,
        theirs={"n_steps": 1024, "gamma": 0.9, "use_sde": True, "sde_sample_freq": 4, "learning_rate": 1e-3},
    ),
    "pendulum-sac": Control(
        task="Pendulum-v1",
        recipe="robot-sac",
        steps=10_000,
        theirs={"learning_rate": 1e-3},
        algorithm="SAC",
        num_envs=1,
    ),
}  # fmt: skip


class _StopAt(StopSignal):
    """Signal that requests a stop after a number of actions."""

    def __init__(self, metrics: Path, actions: int) -> None:
        super().__init__(lambda: None)
        self._metrics, self._actions = metrics, actions

    @property
    def requested(self) -> bool:
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        return sum(json.loads(line)["env/actions"] for line in lines) >= self._actions


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of ended child processes, such as simulators."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def ours(control: Control, seed: int) -> tuple[float, float]:
    """Trains the recipe. Returns (mean return of the last episodes, CPU seconds of all processes)."""
    began_s = _cpu_seconds()
    with tempfile.TemporaryDirectory() as root:
        settings = [
            *control.overrides,
            f"seed={seed}",
            "steps=100000",
            "task.starts.heldout_size=0",
            "logging.loggers=[]",
        ]
        recipe = load_recipe(control.recipe, [*settings, "cluster.devices=cpu:1", "logging.timeline=false"])
        folder = RunFolder.create(Path(root), "run")
        folder.write_config(recipe)
        train(recipe, folder, resume=False, progress=QuietProgress(), stop=_StopAt(folder.metrics, control.steps))
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    per_step = recipe.prompts_per_step
    last = lines[-max(1, LAST // per_step) :]
    scale = recipe.episode.reward_scale  # type: ignore[attr-defined]  # a robot's
    return statistics.fmean(line["env/return"] for line in last) / scale, _cpu_seconds() - began_s


def theirs(control: Control, seed: int) -> tuple[float, float]:
    """Trains Stable-Baselines3's algorithm. Returns the same as `ours`."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    began_s = _cpu_seconds()
    envs = make_vec_env(control.task, n_envs=control.num_envs, seed=seed)
    kind = getattr(stable_baselines3, control.algorithm)
    model = kind("MlpPolicy", envs, seed=seed, device="cpu", **control.theirs)
    model.learn(control.steps)
    done = list(model.ep_info_buffer or ())[-LAST:]
    return statistics.fmean(one["r"] for one in done), _cpu_seconds() - began_s


def table(tasks: Sequence[str], seeds: Sequence[int], steps: int | None = None) -> str:
    """Runs both on each task and seed. Returns the table."""
    rows = [
        f"Mean return of the last {LAST} training episodes; in brackets each of seeds {', '.join(map(str, seeds))}.",
        "",
        "| task | algorithm | steps | interlace | Stable-Baselines3 | CPU seconds, each |",
        "|---|---|---|---|---|---|",
    ]
    for name in tasks:
        control = replace(TASKS[name], steps=steps or TASKS[name].steps)
        mine = [ours(control, seed) for seed in seeds]
        other = [theirs(control, seed) for seed in seeds]
        cells = [
            f"{statistics.fmean(value for value, _ in found):.0f} ({', '.join(f'{value:.0f}' for value, _ in found)})"
            for found in (mine, other)
        ]
        seconds = " and ".join(f"{statistics.fmean(each for _, each in found):.0f}" for found in (mine, other))
        rows.append(
            f"| {control.task} | {control.algorithm} | {control.steps:,} | {cells[0]} | {cells[1]} | {seconds} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="in place of each task's own")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    text = table(given.task, given.seeds, given.steps)
    print(text)
    if given.json:
        given.json.write_text(json.dumps({"table": text}), encoding="utf-8")
    if given.write:
        write_table(given.write, "benchmarks/control.py", text)


if __name__ == "__main__":
    main()
