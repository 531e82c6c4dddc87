"""Cost of the controller by size: events per second, CPU time and memory per sample, with many samples in flight.

    python benchmarks/scale.py [--devices 256 1024 4096] [--preset areal] [--write]

Flow, stages, gate, batcher, dispatch and channels are the real ones; workers only take virtual time. Samples in flight
grow with the devices: 25 per device, so 100,000 on 4,096. Each size runs in a separate process. An event is a callback
of the event loop. Cost that grows faster than the number of devices shows in the column of a sample.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from _page import write_table

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.simulate import Simulation, simulate
from interlace.run.recipe.load import load_recipe
from interlace.runtime.sim.loop import VirtualLoop

SAMPLES_PER_PROMPT = 16
STEPS = 3
PER_DEVICE = 25
"""Samples in flight per device."""


class Counter:
    """Number of callbacks that the event loop was asked to run."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """Counts from now on."""
        call_soon = VirtualLoop.call_soon

        def count(loop: VirtualLoop, *args: object, **context: object) -> object:
            self.count += 1
            return call_soon(loop, *args, **context)  # type: ignore[arg-type]

        VirtualLoop.call_soon = count  # type: ignore[method-assign,assignment]


def measure(preset: str, devices: int) -> dict[str, float]:
    """Simulates one size in this process."""
    settings = [f"schedule={preset}", f"samples_per_prompt={SAMPLES_PER_PROMPT}", "sampling.max_new_tokens=28672"]
    recipe = load_recipe("quickstart", [*settings, f"steps={STEPS}"])
    depth = recipe.schedule.resolved.depth
    prompts = max(1, round(PER_DEVICE * devices / SAMPLES_PER_PROMPT / (1 + depth)))
    recipe = load_recipe("quickstart", [*settings, f"prompts_per_step={prompts}", f"steps={STEPS + 2 * round(depth)}"])
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=devices, num_prompts=65_536)
    counter = Counter()
    counter.install()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    num_samples = len(simulate(recipe, simulation).events)
    seconds = time.process_time() - began_s
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024
    return {
        "devices": devices,
        "in_flight": prompts * SAMPLES_PER_PROMPT * (1 + depth),
        "samples": num_samples,
        "cpu_s": seconds,
        "sample_us": 1e6 * seconds / num_samples,
        "events_per_s": counter.count / seconds,
        "events_per_sample": counter.count / num_samples,
        "memory_mib": memory / 2**20,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--preset", default="areal")
    parser.add_argument("--one", action="store_true", help="measures the size in this process, and prints JSON")
    parser.add_argument("--write", action="store_true", help="into docs/simulator.md")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.preset, given.devices[0])))
        return
    heads = ("devices", "samples in flight", "samples", "CPU s", "CPU us per sample", "events/s", "events per sample",
             "memory MiB")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    rows = []
    for devices in given.devices:
        words = [sys.executable, __file__, "--one", "--devices", str(devices), "--preset", given.preset]
        row = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        rows.append(row)
        cells = [f"{row[name]:,.0f}" for name in ("devices", "in_flight", "samples", "cpu_s", "sample_us")]
        cells += [f"{row['events_per_s']:,.0f}", f"{row['events_per_sample']:.1f}", f"{row['memory_mib']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if given.write:
        write_table(Path(__file__).parent.parent / "docs" / "simulator.md", "scale", "\n".join(lines))


if __name__ == "__main__":
    main()
