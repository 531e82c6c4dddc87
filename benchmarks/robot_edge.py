"""A robot behind a network: real-time chunking against stop-and-wait, at emulated delays of 5, 50 and 150 ms.

Each policy imitates a scripted expert of MetaWorld's reach (chunks of eight actions) and is served as by `interlace
serve --policy` in this process. A process that stands for the robot is connected over loopback and executes one action
every 50 ms: its simulator is stepped by the wall clock, and without an action of a chunk it executes zeros, which is an
idle tick. The delay is emulated in the client, half of it in each direction. Success is counted within the episode's 32
ticks, so an idle tick is lost.

    python benchmarks/robot_edge.py [--heads flow tokens] [--episodes 20] [--write docs/robots.md] [--json x.json]
"""

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from _page import write_table

import interlace
from interlace.data.starts import HELDOUT_FROM
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.robots.envs.load import EnvConfig
from interlace.robots.episodes.robot import RobotConfig
from interlace.robots.serving.client import PolicyClient
from interlace.robots.serving.control import ControlLoop, ControlReport, ControlSettings
from interlace.robots.serving.limits import SafetyLimits
from interlace.robots.serving.simulated import SimulatedRobot
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train

NAME = "benchmarks/robot_edge.py"
CHUNK, HZ = 8, 20.0
MODES: tuple[Literal["stop-and-wait", "rtc"], ...] = ("stop-and-wait", "rtc")
HEADS = {
    "flow": ("robot-flow", "sampling.max_new_tokens=128"),  # (3 steps + the first noise) x 8 actions x 4 numbers
    "tokens": ("robot", "sampling.max_new_tokens=32", "model.robot.decoding=tokens"),
    "gaussian": ("robot", "sampling.max_new_tokens=32", "model.robot.head=gaussian"),
}
"""Head -> recipe and settings."""
IMITATION = (
    "warmup.steps=250", "warmup.optimizer.total_steps=250", "warmup.experts.episodes=20", f"model.robot.chunk={CHUNK}",
    "steps=1", "optimizer.lr=1e-9", "prompts_per_step=8", "minibatches=1", "task.starts.heldout_size=0", "eval_every=0",
    "logging.loggers=[]",
)  # fmt: skip
"""Settings of a policy that imitates; the only step of RL does not change it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Result of one policy, delay and mode, over all episodes."""

    head: str
    rule: str
    delay_ms: float
    mode: str
    episodes: int
    success: float
    idle_ticks: float
    """Ticks of an episode without an action of a chunk."""
    ticks: float
    chunks: float
    late_ticks: float
    server_p50_ms: float
    server_p99_ms: float
    latency_p50_ms: float
    """From the request to the answer, with the delay."""


@contextmanager
def serve_policy(head: str, folder: Path, warmup_steps: int | None) -> Iterator[interlace.Server]:
    """Trains a policy by imitation, and serves it."""
    recipe, *settings = HEADS[head]
    changes = [] if warmup_steps is None else [f"warmup.steps={warmup_steps}"]
    made = load_recipe(recipe, [*IMITATION, *settings, *changes, f"model.cache_dir={folder / 'cache'}"])
    run = RunFolder.create(folder, head) if not (folder / head).exists() else RunFolder(path=folder / head)
    if not run.config.exists():
        train(made, run, progress=QuietProgress(), stop=StopSignal(lambda: None), resume=False)
        run.write_config(made)
    with interlace.serve(run.path, [f"policy.control_hz={HZ}"], port=0, policy=True) as server:
        yield server


def run_robot(
    url: str, api_key: str, env: EnvConfig, episodes: int, delay_s: float, control: ControlSettings
) -> list[ControlReport]:
    """Stands for a robot, in its own process."""
    found = []
    with (
        SimulatedRobot(env.family, env.settings) as robot,
        PolicyClient(url, api_key, delay_s=delay_s) as client,
    ):
        client.schema.check_robot(robot.spec)
        for start in range(HELDOUT_FROM, HELDOUT_FROM + episodes):
            robot.reset(start)
            found.append(ControlLoop(client, robot, control).run(max_ticks=robot.spec.horizon))
    return found


def measure(head: str, server: interlace.Server, delays_ms: Sequence[float], episodes: int) -> list[Case]:
    """Runs the episodes of each delay and mode in a process that stands for the robot."""
    episode = load_recipe(HEADS[head][0]).episode
    assert isinstance(episode, RobotConfig)
    found = []
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        for delay_ms in delays_ms:
            for mode in MODES:
                control = ControlSettings(mode=mode, limits=SafetyLimits(safe_action="zero"))
                work = (server.url, server.api_key, episode.env, episodes, delay_ms / 1000, control)
                found.append(summarize(head, delay_ms, mode, process.submit(run_robot, *work).result()))
                print(json.dumps(asdict(found[-1])), flush=True)
    return found


def summarize(head: str, delay_ms: float, mode: str, reports: Sequence[ControlReport]) -> Case:
    """Returns the means over episodes, and the quantiles of the latencies."""
    server_ms = 1000 * np.concatenate([report.server_s for report in reports])
    latency_ms = 1000 * np.concatenate([report.latencies_s for report in reports])
    rules = {"flow": "guided", "tokens": "forced", "gaussian": "overwritten"}
    return Case(
        head=head,
        rule=rules[head] if mode == "rtc" else "",
        delay_ms=delay_ms,
        mode=mode,
        episodes=len(reports),
        success=float(np.mean([report.success for report in reports])),
        idle_ticks=float(np.mean([report.idle_ticks for report in reports])),
        ticks=float(np.mean([report.ticks for report in reports])),
        chunks=float(np.mean([report.chunks for report in reports])),
        late_ticks=float(np.mean([report.late_ticks for report in reports])),
        server_p50_ms=float(np.quantile(server_ms, 0.5)),
        server_p99_ms=float(np.quantile(server_ms, 0.99)),
        latency_p50_ms=float(np.quantile(latency_ms, 0.5)),
    )


def format_table(cases: Sequence[Case]) -> str:
    """Returns the table of the docs: a row for each head and delay, with a column for each mode."""
    rows: dict[tuple[str, float], list[str]] = {}
    for case in cases:
        rows.setdefault((case.head, case.delay_ms), []).append(f"{case.success:.2f}, {case.idle_ticks:.1f}")
    return "\n".join(
        [
            f"Success and idle ticks; means over {cases[0].episodes} episodes of at most 32 ticks of 50 ms.",
            "",
            "| head | delay | " + " | ".join(MODES) + " |",
            "|---" * (len(MODES) + 2) + "|",
            *(f"| {head} | {delay_ms:.0f} ms | {' | '.join(cells)} |" for (head, delay_ms), cells in rows.items()),
        ]
    )


def main() -> None:
    """Measures, and writes the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=["flow", "tokens"])
    parser.add_argument("--delays", nargs="+", type=float, default=[5.0, 50.0, 150.0], help="milliseconds")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--warmup-steps", type=int, help="steps of imitation; default: the recipe's")
    parser.add_argument("--folder", type=Path, help="keeps the trained policies for a further call")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as temporary:
        for head in given.heads:
            with serve_policy(head, given.folder or Path(temporary), given.warmup_steps) as server:
                cases += measure(head, server, given.delays, given.episodes)
    print(format_table(cases))
    if given.json:
        given.json.write_text(json.dumps([asdict(case) for case in cases], indent=1), encoding="utf-8")
    if given.write:
        write_table(given.write, NAME, format_table(cases))


if __name__ == "__main__":
    main()
