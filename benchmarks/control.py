"""PPO and SAC against Stable-Baselines3 on control and robots, at the same number of simulated steps.

interlace runs a robot's recipe: observations become prompts of a small transformer, and actions are tokens, one of two
for CartPole and numbers for the other tasks. Stable-Baselines3 uses its defaults and the settings of its zoo, which has
no MetaWorld: there both run interlace's simulator, with the same reward and the whole state. With PPO interlace makes
ten passes over each batch, and Stable-Baselines3 twenty and ten. With SAC both make an update of 256 transitions for
each step, interlace after an episode or a few. Hopper's first 10,000 steps come before the first update on both sides:
Stable-Baselines3 draws uniform actions in them, and interlace samples a policy whose output layer is 0. A seed also
draws the initial weights on both sides. Both are judged by their training episodes at the end: the mean return of the
last 20, sampled as in training. CPU seconds include the processes of the simulators.

    python benchmarks/control.py [--task cartpole pendulum pendulum-sac hopper-sac reach-sac] [--seeds 0 1 2]
        [--steps N] [--write docs/robots.md] [--json control.json]
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from _control_tasks import TASKS, Control, SimulatorEnv
from _page import write_table

from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train

LAST = 20
"""Number of last episodes in a run's result."""


class _StopAt(StopSignal):
    """Signal that requests a stop after a number of actions."""

    def __init__(self, metrics: Path, actions: int) -> None:
        super().__init__(lambda: None)
        self._metrics, self._left, self._read = metrics, float(actions), 0

    @property
    def requested(self) -> bool:
        """Reads the lines that were written since the last call."""
        if self._metrics.exists() and self._metrics.stat().st_size > self._read:
            with self._metrics.open("rb") as file:
                file.seek(self._read)
                for line in file.read().splitlines(keepends=True):
                    if line.endswith(b"\n"):
                        self._left -= json.loads(line)["env/actions"]
                        self._read += len(line)
        return self._left <= 0


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its descendants, such as simulators, with those that ended."""
    tick = os.sysconf("SC_CLK_TCK")
    parents, seconds = dict[int, int](), dict[int, float]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # a process that ended meanwhile
            continue
        number = int(path.parent.name)
        parents[number], seconds[number] = int(fields[1]), sum(map(int, fields[11:15])) / tick
    total = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = [os.getpid()]
    for parent in found:  # grows
        children = [child for child, its in parents.items() if its == parent]
        total += sum(seconds[child] for child in children)
        found += children
    return total


def ours(control: Control, seed: int) -> tuple[float, float]:
    """Trains the recipe. Returns (mean return of the last episodes, CPU seconds of all processes).

    Imports do not count, as for Stable-Baselines3.
    """
    for name in ("interlace.robots.models.vla", "interlace.workers.actor", "interlace.engines.rollout.engine"):
        importlib.import_module(name)
    began_s = _cpu_seconds()
    with tempfile.TemporaryDirectory() as root:
        settings = [
            *control.overrides,
            f"seed={seed}",
            f"model.seed={seed}",
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
    make = partial(SimulatorEnv, control.simulator, control.reward_scale) if control.simulator else control.task
    envs = make_vec_env(make, n_envs=control.num_envs, seed=seed)
    kind = getattr(stable_baselines3, control.algorithm)
    model = kind("MlpPolicy", envs, seed=seed, device="cpu", **control.theirs)
    model.learn(control.steps)
    done = list(model.ep_info_buffer or ())[-LAST:]
    return statistics.fmean(one["r"] for one in done) / control.reward_scale, _cpu_seconds() - began_s


def _report_progress(
    run: Callable[[Control, int], tuple[float, float]], task: str, seed: int, found: tuple[float, float]
) -> tuple[float, float]:
    print(f"{task}, seed {seed}, {run.__name__}: return {found[0]:.1f}, CPU {found[1]:.0f} s", file=sys.stderr)
    return found


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
        mine, other = (
            [_report_progress(run, name, seed, run(control, seed)) for seed in seeds] for run in (ours, theirs)
        )
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
