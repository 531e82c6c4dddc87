"""Time of a step if engines are behind a link of 50 ms and 1 Gbit/s, with delta weights, against a link without delay.

    python benchmarks/hosts.py [KEY=VALUE ...] [--steps 16] [--rounds 2] [--json hosts.json]

Two hosts are network namespaces of this machine (needs root), each a node of one Ray cluster with separate memory.
The trainer is on the first and the engine on the second; a relay in user space delays every packet. StreamRL (arXiv
2504.15930) reports this case across data centers. Other work on the machine changes a round as a whole, so the table
compares the medians over the rounds, whose runs alternate.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.hosts import INTERLACE, Hosts, start_ray, two_hosts, why_not
from tests.support.training import SMALL

SETTINGS = (
    "schedule=areal",
    'schedule.placement={rollout: "1", reference: "0", critic: "0", actor: "0"}',
    "weights.codec=delta",
    "weights.transport=object_store",
    "warmup=null",
    "evaluation.num_prompts=1",
    "model=tiny:mini",
    "prompts_per_step=16",
    "samples_per_prompt=8",
    "sampling.max_new_tokens=64",
    "cluster.backend=ray",
    "cluster.threads_per_worker=1",
)
LIMIT_S = 900.0
FIRST = 4
"""First step that counts; the channel fills in the steps before."""


def run(hosts: Hosts, variables: dict[str, str], name: str, steps: int, changes: Sequence[str]) -> list[float]:
    """Trains over both hosts, with changed settings. Returns the seconds of each step that counts."""
    host = hosts.first
    log = host.folder / f"{name}.log"
    given = [*SMALL, *SETTINGS, f"steps={steps}", f"cluster.address={variables['RAY_ADDRESS']}", *changes]
    process = host.start([*INTERLACE, "train", "quickstart", "--name", name, *given], log, variables)
    if process.wait(LIMIT_S):
        raise SystemExit(f"the run failed:\n{log.read_text()[-3000:]}")
    lines = (host.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][FIRST - 1 :]
    return [row["timing_s/step"] for row in rows]


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", help="settings of longer steps, such as sampling.max_new_tokens=512")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.steps < FIRST:
        parser.error(f"--steps {given.steps} leaves no step that counts: use at least {FIRST}")
    if reason := why_not():
        raise SystemExit(f"this machine cannot have hosts: {reason}")
    found: dict[float, list[float]] = {0.0: [], 0.025: []}
    for number in range(given.rounds):
        for delay_s in found:
            with two_hosts(delay_s) as hosts:
                seconds = run(hosts, start_ray(hosts), f"round-{number}", given.steps, given.changes)
            found[delay_s] += seconds
            print(f"round {number}, {delay_s * 2000:.0f} ms: median {statistics.median(seconds):.3f} s", flush=True)
    base = statistics.median(found[0.0])
    print("\n| round trip | steps | median seconds of a step | mean | against no delay |\n|---|---|---|---|---|")
    for delay_s, seconds in found.items():
        median = statistics.median(seconds)
        mean = statistics.mean(seconds)
        print(f"| {delay_s * 2000:.0f} ms | {len(seconds)} | {median:.3f} | {mean:.3f} | {median / base:.2f} |")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
