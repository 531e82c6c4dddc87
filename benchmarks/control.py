"""PPO on gymnasium's classic control against Stable-Baselines3's PPO, at the same number of simulated steps.

Ours goes the whole way of a robot's recipe: observations become prompts of a small transformer, actions are tokens.
Stable-Baselines3 has its defaults but for what its zoo sets for CartPole and Pendulum; ours has the same discounts, and
ten passes over each batch where Stable-Baselines3 makes twenty and ten. Each is judged by its training episodes at the
end: the mean return of the last 20, drawn as in training.

    python benchmarks/control.py [--task cartpole pendulum] [--seeds 0 1 2] [--steps 15000]
        [--write docs/robots.md] [--json control.json]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _page import write_table

from interlace.jobs.train import train
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.recipes.load import load_recipe

BEGIN, END = "<!-- benchmarks/control.py -->", "<!-- end of control -->"
LAST = 20
"""Episodes that a run is judged by."""
PENDULUM = (
    "model.robot.state_size=3",
    "model.robot.bins=15",
    "model.robot.low=[-2.0]",
    "model.robot.high=[2.0]",
    "task.starts.instructions=[swing the pole up and balance it]",
    "episode.features=[{of: [0, 1, 2], scale: [1.0, 1.0, 8.0]}]",
    "episode.env.settings={tasks: [Pendulum-v1], horizon: 200}",
    "algorithm.gamma=0.9",
    "epochs=10",
    "minibatches=8",
    "prompts_per_step=8",
)
TASKS = {
    "cartpole": (
        "CartPole-v1",
        ("epochs=10", "algorithm.gamma=0.98", "algorithm.lam=0.8"),
        {"n_steps": 256, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "learning_rate": 1e-3},
    ),
    "pendulum": ("Pendulum-v1", PENDULUM, {"n_steps": 1024, "gamma": 0.9, "use_sde": True, "learning_rate": 1e-3}),
}


class _StopAt(StopSignal):
    """Asks for a stop once so many actions were carried out."""

    def __init__(self, metrics: Path, actions: int) -> None:
        super().__init__(lambda: None)
        self._metrics, self._actions = metrics, actions

    @property
    def requested(self) -> bool:
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        return sum(json.loads(line)["env/actions"] for line in lines) >= self._actions


def ours(overrides: Sequence[str], seed: int, steps: int) -> tuple[float, float]:
    """Trains by the recipe. Returns (mean return of the last episodes, CPU seconds of this process)."""
    began_s = time.process_time()
    with tempfile.TemporaryDirectory() as root:
        settings = [*overrides, f"seed={seed}", "steps=100000", "task.starts.heldout_size=0", "logging.loggers=[]"]
        recipe = load_recipe("robot-cartpole", [*settings, "cluster.devices=cpu:1", "logging.timeline=false"])
        folder = RunFolder.create(Path(root), "run")
        folder.write_config(recipe)
        train(recipe, folder, resume=False, progress=QuietProgress(), stop=_StopAt(folder.metrics, steps))
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    per_step = recipe.prompts_per_step
    last = lines[-max(1, LAST // per_step) :]
    scale = recipe.episode.reward_scale  # type: ignore[attr-defined]  # a robot's
    return statistics.fmean(line["env/return"] for line in last) / scale, time.process_time() - began_s


def theirs(task: str, settings: dict[str, object], seed: int, steps: int) -> tuple[float, float]:
    """Trains Stable-Baselines3's PPO, as `ours`."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    began_s = time.process_time()
    model = PPO("MlpPolicy", make_vec_env(task, n_envs=4, seed=seed), seed=seed, device="cpu", **settings)
    model.learn(steps)
    done = list(model.ep_info_buffer or ())[-LAST:]
    return statistics.fmean(one["r"] for one in done), time.process_time() - began_s


def table(tasks: Sequence[str], seeds: Sequence[int], steps: int) -> str:
    """Runs both on each task and seed."""
    rows = [
        f"Mean return of the last {LAST} training episodes after {steps:,} steps; in brackets each of seeds "
        f"{', '.join(map(str, seeds))}.",
        "",
        "| task | interlace | Stable-Baselines3 | CPU seconds, each |",
        "|---|---|---|---|",
    ]
    for name in tasks:
        task, overrides, settings = TASKS[name]
        mine = [ours(overrides, seed, steps) for seed in seeds]
        other = [theirs(task, settings, seed, steps) for seed in seeds]
        cells = [
            f"{statistics.fmean(value for value, _ in found):.0f} ({', '.join(f'{value:.0f}' for value, _ in found)})"
            for found in (mine, other)
        ]
        seconds = " and ".join(f"{statistics.fmean(each for _, each in found):.0f}" for found in (mine, other))
        rows.append(f"| {task} | {cells[0]} | {cells[1]} | {seconds} |")
    return "\n".join(rows)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15000)
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
