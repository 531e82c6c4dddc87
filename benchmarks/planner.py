"""Predicted against measured speed of many schedules, the ranking by predictions, and the loss of a choice.

    python benchmarks/planner.py [--quick] [--clusters local,ray] [--workloads quickstart,longtail] [--write]
    python benchmarks/planner.py --points 16 [--store docs/planner.json] [--write]
    python benchmarks/planner.py --again [--workloads quickstart,longtail] [--schedules areal]
    python benchmarks/planner.py --drift [--write]
    python benchmarks/planner.py --live [--write]
    python benchmarks/planner.py --mixed [--write]
    python benchmarks/planner.py --lending [--write]
    python benchmarks/planner.py --time [--write]
    python benchmarks/planner.py --robots [--write]

Each recipe is profiled once on each cluster. Then every schedule is simulated, and trained for some steps with a
learning rate near 0, so that lengths stay constant, between two runs of `verl-colocated`. Its speed is a ratio to these
two, because the machine drifts by more than schedules differ; the change from one to the next is the noise. The
prediction is written to the store, under its hash, before its run. There are twelve workloads; the last one is drawn
from a seed, and --workloads random-SEED draws another. --store keeps profiles and points, which are not measured again:
--points N measures N more and ends. `tau` is Kendall's, over the pairs of schedules that differ by more than the noise.
`regret` is the time per trained token of the chosen schedule, relative to the one that was measured as the fastest, in
three further runs of both in turn. --again predicts stored points with their stored profiles and the present
simulator, and runs nothing. --write puts the table into docs/planner.md and the picture next to the page.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from _page import make_picture, write_table
from _planner_drift import drift_table
from _planner_lending import lending_table
from _planner_live import live_table
from _planner_mixed import mixed_table
from _planner_points import Bench, Effort, Point, Store, summarize
from _planner_robots import robots_table
from _planner_time import time_table
from _planner_workloads import NAMES, POINTS

from interlace.core.errors import UserError
from interlace.forecast.plan_report import Plot, nice_ticks

SCHEDULES = (
    "verl-colocated", "rlinf-disaggregated", "one-step-off", "areal", "streamrl-async", "pipelinerl", "async-colocated",
    "rollpacker", "magistral", "rlhfuse", "asyncflow", "verl-fully-async-d",
)  # fmt: skip
QUICK = ("verl-colocated", "one-step-off", "areal", "async-colocated")
DOCS = Path(__file__).parent.parent / "docs"
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626")


def scatter(points: Sequence[Point]) -> str:
    """Draws measured over predicted ratios, with one colour per workload; on the line both are equal."""
    plot = Plot(width=520.0, height=420.0)
    most = max(max(point.predicted_ratio, point.measured.ratio) for point in points)
    ticks = nice_ticks(0.0, most, 5)
    x, y = plot.x_scale(0.0, ticks[-1]), plot.y_scale(0.0, ticks[-1])
    plot.grid(x, y, ticks, ticks)
    plot.path([(x(0.0), y(0.0)), (x(ticks[-1]), y(ticks[-1]))], "#9ca3af")
    for place, workload in enumerate(dict.fromkeys(point.workload for point in points)):
        colour = COLOURS[place % len(COLOURS)]
        for point in (each for each in points if each.workload == workload):
            tip = f"{workload}, {point.cluster}, {point.schedule}: {point.error:+.0%}"
            plot.dot(x(point.predicted_ratio), y(point.measured.ratio), colour, tip)
        plot.text(70, 30 + 15 * place, workload, "start")
        plot.dot(62, 26 + 15 * place, colour, workload)
    plot.x_title("predicted speed relative to verl-colocated; upwards: measured")
    figure = plot.render("measured over predicted speed relative to verl-colocated")
    rules = "text{font:11px sans-serif;fill:#667085}.rule{stroke:#e6e9f0}.axis{stroke:#667085}.curve{fill:none}"
    return make_picture(figure, rules)


def write(store: Store) -> None:
    """Writes the table and the picture into the page."""
    picture = "![measured over predicted speed relative to verl-colocated](planner.svg)"
    write_table(DOCS / "planner.md", "measured", f"{summarize(store)}\n\n{picture}")
    (DOCS / "planner.svg").write_text(scatter(store.points) + "\n", encoding="utf-8")


def effort_of(args: argparse.Namespace) -> Effort:
    """Returns the sizes of the measurements that the arguments set."""
    return Effort(devices=args.devices, steps=args.steps, seconds=args.seconds, budget_s=args.budget)


def measure_all(
    store: Store, wanted: Sequence[tuple[str, str]], names: Sequence[str], args: argparse.Namespace
) -> None:
    """Measures missing points of workloads on clusters, at most args.points of them."""
    left = args.points if args.points >= 0 else len(wanted) * len(names)
    effort = effort_of(args)
    for workload, cluster in wanted:
        if left <= 0:
            return
        try:
            bench = Bench(store, workload, cluster, effort)
            left -= bench.measure_points(names, left)
        except UserError as error:  # a part that is not on this machine
            print(f"{workload} {cluster}: {error}", flush=True)
            continue
        if left > 0:
            bench.confirm()


def main() -> None:
    """Runs the comparison; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four schedules, one workload, local, few steps")
    parser.add_argument("--drift", action="store_true", help="simulated: answers that grow, and the online planner")
    parser.add_argument("--live", action="store_true", help="simulated: changes of the schedule without a restart")
    parser.add_argument("--mixed", action="store_true", help="simulated: two kinds of devices against one, by price")
    parser.add_argument("--lending", action="store_true", help="simulated: when lent devices go back to training")
    parser.add_argument("--time", action="store_true", help="real time of searches, and the loss of short ones")
    parser.add_argument("--robots", action="store_true", help="simulated: placements of RLinf's robot workloads")
    parser.add_argument("--clusters", default="local,ray")
    parser.add_argument("--workloads", default=",".join(NAMES))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150, help="measured of each schedule, at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="of the measured steps, approximately")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of each profile")
    parser.add_argument("--store", type=Path, help="file of the points; default with --points: docs/planner.json")
    parser.add_argument("--points", type=int, default=-1, help="measure at most so many more")
    parser.add_argument("--again", action="store_true", help="predict stored points with the present simulator")
    parser.add_argument("--json", type=Path, help="also write the points there")
    parser.add_argument("--write", action="store_true", help="into docs/planner.md")
    args = parser.parse_args()
    for name, make in (
        ("drift", drift_table),
        ("live", live_table),
        ("mixed", mixed_table),
        ("lending", lending_table),
        ("time", time_table),
        ("robots", robots_table),
    ):
        if getattr(args, name):
            table = make()
            print(table)
            if args.write:
                write_table(DOCS / "planner.md", name, table)
            return
    clusters, workloads, names = (value.split(",") for value in (args.clusters, args.workloads, args.schedules))
    if args.quick:
        clusters, workloads, names, args.steps, args.budget = ["local"], ["quickstart"], list(QUICK), 4, 10.0
    store = Store(args.store or (DOCS / "planner.json" if args.points >= 0 or args.again else None))
    wanted = [(workload, cluster) for cluster in clusters for workload in workloads
              if (cluster, workload) in POINTS or workload not in NAMES]  # fmt: skip
    if args.again:
        for workload, cluster in wanted:
            if store.points_of(workload, cluster):
                Bench(store, workload, cluster, effort_of(args)).predict_again(names)
        return
    measure_all(store, wanted, names, args)
    if args.json:
        args.json.write_text(json.dumps([asdict(point) for point in store.points]) + "\n", encoding="utf-8")
    if store.points:
        print(summarize(store))
        if args.write:
            write(store)


if __name__ == "__main__":
    main()
