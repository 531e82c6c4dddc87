"""Placements of robots' runs on the virtual clock, with GPU-bound and CPU-bound simulators, against RLinf's results.

    python benchmarks/embodied_placements.py [--devices 8 16 32] [--json FILE]

The shipped profiles rlinf-maniskill and rlinf-libero give the costs: rooflines of the policy, assumed costs of the
simulators. Nothing was fitted to a ratio. RLinf (arXiv 2510.06710, section V.B and appendix IX.B) compares its
placements with its disaggregated one in ManiSkill, so these ratios are against the disaggregated preset too. In LIBERO
it compares with another system (SimpleVLA-RL), so only the order of the placements can be compared.
"""

import argparse
import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.simulate import Simulation, simulate
from interlace.run.recipe.load import load_recipe

COLLOCATED, DISAGGREGATED = "rlinf-embodied-collocated", "rlinf-embodied-disaggregated"
HYBRID, WHOLE = "rlinf-embodied-hybrid", "rlinf-embodied-hybrid, one stage"
PRESETS = (DISAGGREGATED, COLLOCATED, WHOLE, HYBRID, "embodied-async")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One kind of simulator, and a policy that acts in it."""

    title: str
    profile: str
    """Shipped profile with the sizes and costs."""
    base: str
    """Placement that the ratios are against."""
    published: str
    on_host: bool = False


WORKLOADS = (
    Workload(
        title="GPU-bound (OpenVLA in ManiSkill): 256 environments, 80 steps, an action of 7 tokens a step",
        profile="rlinf-maniskill",
        base=DISAGGREGATED,
        published="hybrid against disaggregated: 1.88 on 8 devices, 1.61 to 1.69 on 16 and 32; on many devices hybrid "
        "is ahead of collocated",
    ),
    Workload(
        title="CPU-bound (OpenVLA-OFT in LIBERO): 512 environments, 64 steps, chunks of 8 steps drawn in one pass",
        profile="rlinf-libero",
        base=COLLOCATED,
        on_host=True,
        published="collocated and hybrid with one stage ahead of the others",
    ),
)


def step_s(work: Workload, preset: str, devices: int) -> tuple[float, float]:
    """Returns the seconds of a step and the useful share of device time, with a full pipeline."""
    steps, counted = (7, 3) if preset == "embodied-async" else (2, 1)
    host = ["schedule.placement.env=host"] if work.on_host else []
    if preset == WHOLE:
        host.append("schedule.granularity.env=100%")
    costs = load_profile(work.profile)
    sizes = costs.sizes
    assert sizes is not None, "the shipped profiles state their sizes"
    recipe = load_recipe(
        "robot",
        [
            f"schedule={preset.partition(',')[0]}",
            *host,
            "algorithm={name: grpo, drop_zero_variance: false}",
            f"prompts_per_step={sizes.prompts_per_step}",
            f"samples_per_prompt={sizes.samples_per_prompt}",
            f"minibatches={sizes.num_envs // 64}",
            f"steps={steps}",
            f"episode.env.num_envs={sizes.num_envs}",
            f"sampling.max_new_tokens={sizes.max_new_tokens}",
        ],
    )
    run = simulate(recipe, Simulation(profile=costs, num_devices=devices)).run
    rows = run.rows[-counted - (2 if counted > 1 else 0) :][:counted]
    seconds = [float(row["timing_s/step"]) for row in rows]
    useful = [sum(row[f"goodput/{name}"] for name in ("train", "generate", "simulate", "inference")) for row in rows]
    return sum(seconds) / len(seconds), sum(useful) / len(useful)


def table(sizes: Sequence[int], presets: Sequence[str]) -> tuple[str, list[Mapping[str, object]]]:
    """Runs all simulations. Returns the table and its figures."""
    lines, figures = [], []
    for work in WORKLOADS:
        lines += [textwrap.fill(f"{work.title}. RLinf publishes: {work.published}.", 120), ""]
        lines += [f"| preset | {' | '.join(f'{size} devices' for size in sizes)} |", "|---" * (len(sizes) + 1) + "|"]
        base: dict[int, float] = {}
        for preset in sorted(presets, key=lambda name: name != work.base):
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
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    text, figures = table(given.devices, given.presets)
    print(text)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
