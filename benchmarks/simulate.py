"""Cost of a simulation: CPU microseconds per simulated sample, by preset and number of devices.

    python benchmarks/simulate.py [--presets verl-colocated,areal] [--devices 16,256,1000] [--rounds 2] [--json FILE]

A whole run is timed, from its first event to its last row: the minimum over some rounds, in CPU time of one thread, so
that other work on the machine affects it only through the caches. Responses are long (at most 28k tokens), with 16
samples per prompt.
"""

import argparse
import gc
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.simulate import Simulation, simulate
from interlace.run.recipe.load import load_recipe

PROFILE = "qwen2.5-7b-h800"
SAMPLES_PER_PROMPT = 16
MIN_PROMPTS = 256
"""Minimum prompts per step; larger clusters use more, because most engines would otherwise be idle."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One row."""

    preset: str
    devices: int
    samples: int
    """Simulated samples of a run."""
    sample_us: float
    """CPU microseconds per sample."""


def measure(preset: str, devices: int, steps: int, rounds: int) -> Cost:
    """Returns the minimum over the rounds, each including the collection of its garbage."""
    recipe = load_recipe(
        "quickstart",
        [
            f"schedule={preset}",
            f"prompts_per_step={max(MIN_PROMPTS, devices)}",
            f"samples_per_prompt={SAMPLES_PER_PROMPT}",
            "sampling.max_new_tokens=28672",
            f"steps={steps}",
        ],
    )
    simulation = Simulation(profile=load_profile(PROFILE), num_devices=devices)
    took, num_samples = [], 0
    # Excludes the quarter of a million objects of imported modules from garbage collection.
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        start_s = time.process_time()
        num_samples = len(simulate(recipe, simulation).events)
        gc.collect()
        took.append(time.process_time() - start_s)
    gc.unfreeze()
    return Cost(preset=preset, devices=devices, samples=num_samples, sample_us=1e6 * min(took) / num_samples)


def main() -> None:
    """Prints a row per preset and a column per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="verl-colocated,areal")
    parser.add_argument("--devices", default="16,256,1000")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [int(each) for each in options.devices.split(",")]
    print(f"{'CPU us a sample':18s} " + "".join(f"{size:6d} devices" for size in sizes))
    costs: list[Cost] = []
    for preset in options.presets.split(","):
        mine = [measure(preset, size, options.steps, options.rounds) for size in sizes]
        costs += mine
        print(f"{preset:18s} " + "".join(f"{cost.sample_us:14.0f}" for cost in mine), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")


if __name__ == "__main__":
    main()
