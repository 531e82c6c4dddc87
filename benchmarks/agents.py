"""Agents: the gain of keeping KV between turns, the controller's cost per turn, and a tree against its branches.

- `rollout`: 256 episodes of 8 turns with tools of 50 ms on one native engine, through the generation stage, the pool
  and the driver of training. `kept` and `not kept` (`prefix_cache: false`) alternate; prompts share nothing, so the
  difference comes from contexts that later turns reuse. Also the share of history tokens that are reused, and the CPU
  seconds of the controller's thread per turn, here and with episodes in two worker processes after their start.
- `crowd`: 1,000 concurrent episodes, in this process and in two workers; counts samples that failed.
- `tree`: eight branches after 256 shared tokens, against each branch alone (`train_step.py --case tree`), and the
  largest difference of their gradients.

Ratios compare neighbours in time; lowest and highest are over the rounds. CPU seconds are of the whole process.

    python benchmarks/agents.py [--only rollout crowd tree] [--rounds 3] [--write benchmarks/RESULTS.md] [--json FILE]
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from train_step import branches_alone, build, make_trees, measure

from interlace.algorithms import create_algorithm
from interlace.core.types import Prompt, Sample, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig
from interlace.engines.train import OptimizerConfig, TrainConfig, TrainEngine
from interlace.rollouts.base import Episode, Session
from interlace.rollouts.episode_workers import WorkerEpisodes
from interlace.rollouts.session import NO_LIMITS, SessionLimits
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parents[1]))
from _page import write_table

from tests.support.episode_runs import OneEngine

PARTS = ("rollout", "crowd", "tree")
EPISODES, TURNS, TOOL_S = 256, 8, 0.05
CROWD, CROWD_TURNS, WORKERS = 1000, 3, 2
PROMPT_TOKENS, ANSWER_TOKENS, TOOL_TOKENS = 128, 16, 48
MAX_RUNNING, MAX_TOKENS = 64, 1 << 18
BEGIN, END = "<!-- benchmarks/agents.py -->", "<!-- end -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure."""

    name: str
    value: str
    spread: str = ""
    """Lowest and highest value over the rounds."""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One rollout of a wave of episodes."""

    wall_s: float
    cpu_s: float
    controller_s: float
    """CPU seconds of the controller's thread."""
    history_found: float
    """Reused share of history tokens, 0 to 1."""
    num_turns: int
    num_failed: int


class ToolUser:
    """Episode of several turns with a tool between them, whose tokens are keyed by the sample."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns

    async def run(self, prompt: Prompt, session: Session) -> float:
        """Runs the turns."""
        context = prompt.token_ids.tolist()
        words = np.random.default_rng(session.seed % 2**32)
        for number in range(self._num_turns):
            turn = await session.generate(context)
            if number < self._num_turns - 1:
                async with session.waiting("a tool"):
                    await asyncio.sleep(TOOL_S)
                context = [*context, *turn.token_ids.tolist(), *words.integers(3, 90, TOOL_TOKENS).tolist()]
        return 1.0


def make(num_turns: int) -> tuple[Episode, SessionLimits]:
    """Creates an episode in a worker."""
    return ToolUser(num_turns), NO_LIMITS


def roll_out(num_episodes: int, num_turns: int, *, kept: bool, workers: int = 0, model: str = "mini") -> Rollout:
    """Runs a wave of episodes to its end."""
    torch.set_num_threads(1)
    engine = OneEngine(
        model=model,
        config=NativeConfig(max_running=MAX_RUNNING, max_tokens=MAX_TOKENS, prefix_cache=kept),
        schedule=Schedule.parse({"concurrency": MAX_RUNNING}),
        params=SamplingParams(max_new_tokens=ANSWER_TOKENS),
    )

    async def flow(cluster: Cluster) -> Rollout:
        pool = await engine.pool(cluster, num_episodes)
        episode: Episode = ToolUser(num_turns)
        if workers:
            there = WorkerEpisodes(partial(make, num_turns), engine.params, workers)
            cluster.at_end(there.close)
            with cluster.waits.operation(who="episodes", what="their processes' start"):
                while there.num_ready < workers:
                    await asyncio.sleep(0.05)
            episode = there
        wave = [Sample(key=SampleKey(gid, 0), prompt=prompt(gid)) for gid in range(num_episodes)]
        before = time.perf_counter(), time.process_time(), time.thread_time()
        rows, failures = await engine.play(pool, cluster, episode, wave)
        after = time.perf_counter(), time.process_time(), time.thread_time()
        wall_s, cpu_s, controller_s = (end - start for start, end in zip(before, after, strict=True))
        return Rollout(
            wall_s=wall_s,
            cpu_s=cpu_s,
            controller_s=controller_s,
            history_found=pool.engine_metrics().get("history_reused", 0.0),
            num_turns=sum(sum(each.sampled is None for each in row.segments) for row in rows),
            num_failed=len(failures),
        )

    return asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))


def prompt(gid: int) -> Prompt:
    """Returns a prompt without a common prefix with others."""
    token_ids = np.random.default_rng(gid).integers(3, 90, PROMPT_TOKENS).astype(np.int32)
    return Prompt(uid=f"p{gid}", token_ids=token_ids, text="", answer="")


def rollout_rows(rounds: int) -> list[Row]:
    """Measures the gain of keeping KV between turns."""
    pairs, here, there = [], [], []
    for _ in range(rounds):
        kept, apart = (roll_out(EPISODES, TURNS, kept=each) for each in (True, False))
        pairs.append((apart.wall_s / kept.wall_s, apart.cpu_s / kept.cpu_s, kept.history_found))
        here.append(1e3 * kept.controller_s / kept.num_turns)
        in_workers = roll_out(EPISODES, TURNS, kept=True, workers=WORKERS)
        there.append(1e3 * in_workers.controller_s / in_workers.num_turns)
    wall, cpu, found = zip(*pairs, strict=True)
    shape = f"{EPISODES} x {TURNS} turns, tools of {1e3 * TOOL_S:.0f} ms; median of the wall-clock ratios"
    return [
        figure("kept against not kept", wall, "{:.2f} times", note=f"{shape}; of CPU seconds {median(cpu):.2f}"),
        figure("history tokens found", [100 * each for each in found], "{:.1f} %"),
        figure("controller, a turn", here, "{:.2f} ms", note="CPU of its thread, episodes included"),
        figure("controller, a turn, workers", there, "{:.2f} ms", note=f"episodes in {WORKERS} processes"),
    ]


def crowd_rows() -> list[Row]:
    """Runs a thousand concurrent episodes, in this process and in others."""
    rows = []
    for workers, name in ((0, "failed of 1,000"), (WORKERS, "failed of 1,000, workers")):
        made = roll_out(CROWD, CROWD_TURNS, kept=True, workers=workers, model="micro")
        note = f"{CROWD_TURNS} turns each, {made.wall_s:.1f} s, {made.num_turns / made.wall_s:.0f} turns/s"
        rows.append(Row(name=name, value=str(made.num_failed), note=note))
    return rows


def tree_rows(rounds: int) -> list[Row]:
    """Compares a tree with its branches."""
    torch.set_num_threads(1)
    tree = next(row for row in measure("tiny", "tree", rounds + 2) if row.contender == "tree")
    spread = f"{tree.relative_low:.2f} to {tree.relative_high:.2f}"
    note = f"gradients differ by {gradient_difference():.0e} of the largest"
    return [Row(name="tree against branches alone", value=f"{tree.relative:.2f} times", spread=spread, note=note)]


def gradient_difference() -> float:
    """Returns the largest gradient difference between trees and their branches, divided by the largest gradient."""
    trees = make_trees()
    found = []
    alone = [[branch] for tree in trees for branch in branches_alone(tree, apart=False)]
    for calls in ([trees], alone):
        engine = TrainEngine(
            build("tiny"),
            loss=create_algorithm("grpo", {"aggregation": "token_mean"}).loss,
            optimizer=OptimizerConfig(lr=1e-6),
            config=TrainConfig(tokens_per_microbatch=1 << 15),
        )
        for samples in calls:
            engine.accumulate(samples)
        found.append(torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None]))
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


def figure(name: str, values: Sequence[float], form: str, note: str = "") -> Row:
    """Returns the row of a figure that was measured in several rounds."""
    spread = f"{form.format(min(values)).split()[0]} to {form.format(max(values)).split()[0]}"
    return Row(name=name, value=form.format(median(values)), spread=spread, note=note)


def median(values: Sequence[float]) -> float:
    """Returns the median."""
    return statistics.median(values)


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| | measured | lowest to highest | |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.value} | {row.spread} | {row.note} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Measures the parts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, default=None, help="a page whose table is replaced")
    parser.add_argument("--json", type=Path, default=None, help="also write the rows there")
    given = parser.parse_args()
    rows: list[Row] = []
    if "rollout" in given.only:
        rows += rollout_rows(given.rounds)
    if "crowd" in given.only:
        rows += crowd_rows()
    if "tree" in given.only:
        rows += tree_rows(given.rounds)
    text = table(rows)
    print(text)
    if given.write:
        write_table(given.write, "benchmarks/agents.py", text)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
