"""Placements of robots' runs on the virtual clock, with GPU-bound and CPU-bound simulators, against RLinf's results.

    python benchmarks/embodied_placements.py [--devices 8 16 32] [--write docs/robots.md] [--json FILE]

A policy of seven billion parameters has the costs of the shipped profile qwen2.5-7b-h800 (a roofline of data sheets,
not measured). The costs of simulators are assumed, in PROFILES, and were not fitted to any ratio. RLinf's ratios are
against other systems (RL4VLA, SimpleVLA-RL); the ratios here are against the collocated preset in the same simulation.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _page import write_table

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.profile.types import EnvCosts, Lengths, Profile, Turns
from interlace.forecast.simulate import Simulation, simulate
from interlace.run.recipe.load import load_recipe

BEGIN, END = "<!-- benchmarks/embodied_placements.py -->", "<!-- end of placements -->"
BASE = "rlinf-embodied-collocated"
PRESETS = (BASE, "rlinf-embodied-disaggregated", "rlinf-embodied-hybrid", "embodied-async")
CORES = 16
"""Processor cores per device."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One kind of simulator, and a policy that acts in it."""

    title: str
    num_envs: int
    turns: int
    """Chunks of an episode."""
    sensed_tokens: int
    """Tokens of an observation."""
    answer_tokens: int
    """Decode steps of a chunk; 1 if all its tokens are decoded in one pass."""
    env: EnvCosts
    on_host: bool = False
    published: str = ""

    def profile(self, devices: int) -> Profile:
        """Returns the costs on a cluster."""
        return load_profile("qwen2.5-7b-h800").model_copy(
            update={
                "env": self.env.model_copy(update={"host_processes": CORES * devices}),
                "turns": Turns(turns=(self.turns,), given_tokens=(self.sensed_tokens,), tool_s=(0.0,)),
                "lengths": Lengths(prompt_tokens=30, median=self.answer_tokens, prompt_sigma=0.0, response_sigma=0.0),
            }
        )


WORKLOADS = (
    Workload(
        title="GPU-bound: 256 environments, 80 steps, an action of 7 tokens a step",
        num_envs=256,
        turns=80,
        sensed_tokens=256,
        answer_tokens=7,
        # Physics and a picture of 224 x 224: mostly launch overhead if few environments share a device.
        env=EnvCosts(chunks=((1, 0.08), (32, 0.16), (256, 0.6)), reset_s=1.0, device_bytes=8 << 30),
        published="1.61-1.88, hybrid against RL4VLA",
    ),
    Workload(
        title="CPU-bound: 512 environments, 64 steps, chunks of 8 steps drawn in one pass",
        num_envs=512,
        turns=8,
        sensed_tokens=568,  # two pictures, and a query for each of 56 action tokens
        answer_tokens=1,
        env=EnvCosts(chunks=((1, 8 / 25),), reset_s=1.0),  # 25 steps per second with pictures, on a core
        on_host=True,
        published="1.25-2.13, collocated against SimpleVLA-RL",
    ),
)


def step_s(work: Workload, preset: str, devices: int) -> tuple[float, float]:
    """Returns the seconds of a step and the useful share of device time, with a full pipeline."""
    steps, counted = (7, 3) if preset == "embodied-async" else (2, 1)
    host = ["schedule.placement.env=host"] if work.on_host else []
    recipe = load_recipe(
        "robot",
        [
            f"schedule={preset}",
            *host,
            "algorithm={name: grpo, drop_zero_variance: false}",
            f"prompts_per_step={work.num_envs // 8}",
            "samples_per_prompt=8",
            f"minibatches={work.num_envs // 64}",
            f"steps={steps}",
            f"episode.env.num_envs={work.num_envs}",
            f"sampling.max_new_tokens={work.answer_tokens}",
        ],
    )
    run = simulate(recipe, Simulation(profile=work.profile(devices), num_devices=devices)).run
    rows = run.rows[-counted - (2 if counted > 1 else 0) :][:counted]
    seconds = [float(row["timing_s/step"]) for row in rows]
    useful = [sum(row[f"goodput/{name}"] for name in ("train", "generate", "simulate", "inference")) for row in rows]
    return sum(seconds) / len(seconds), sum(useful) / len(useful)


def table(sizes: Sequence[int], presets: Sequence[str]) -> tuple[str, list[Mapping[str, object]]]:
    """Runs all simulations. Returns the table and its figures."""
    lines, figures = [], []
    for work in WORKLOADS:
        lines += [f"{work.title}. RLinf publishes {work.published}.", ""]
        lines += [f"| preset | {' | '.join(f'{size} devices' for size in sizes)} |", "|---" * (len(sizes) + 1) + "|"]
        base: dict[int, float] = {}
        for preset in presets:
            cells = []
            for size in sizes:
                began_s = time.process_time()
                seconds, useful = step_s(work, preset, size)
                base.setdefault(size, seconds)
                ratio = base[size] / seconds
                cells.append(f"{seconds:.0f} s, {ratio:.2f} times, {useful:.0%} useful")
                figures.append({"work": work.title, "preset": preset, "devices": size, "step_s": seconds,
                                "ratio": ratio, "useful": useful})  # fmt: skip
                print(preset, size, cells[-1], f"({time.process_time() - began_s:.0f} CPU s)", flush=True)
            lines.append(f"| `{preset}` | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip(), figures


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    text, figures = table(given.devices, given.presets)
    print(text)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if given.write:
        write_table(given.write, "benchmarks/embodied_placements.py", text)


if __name__ == "__main__":
    main()
