"""Predicted against measured step time of many schedules, how well predictions rank them, and what a choice costs.

    python benchmarks/planner.py [--quick] [--clusters local,ray] [--workloads quickstart,longtail] [--write]
    python benchmarks/planner.py --drift [--write]

Each recipe is profiled on each cluster, once at the start; then every schedule is simulated and really trained for
some steps with a learning rate next to nothing, so that lengths stay what they were. `tau` is Kendall's, over the
schedules of one recipe on one cluster; `regret` is the measured time a trained token of the schedule with the best
prediction against the best measured one. --write puts the table into docs/planner.md and the picture beside the page.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from _page import write_table
from _planner_drift import drift_table

from interlace.jobs.plan import under
from interlace.jobs.scoring import Workplace
from interlace.jobs.simulate import Simulation
from interlace.observe.progress import QuietProgress
from interlace.observe.report.svg import Plot, nice_ticks
from interlace.profiling.probe import measure, num_devices
from interlace.profiling.profile import profile_recipe, with_zero_lr
from interlace.recipes.check import check_recipe
from interlace.recipes.config import Recipe
from interlace.recipes.load import load_recipe
from interlace.schedule.plans import Fidelity, Score
from interlace.schedule.presets import load_schedule

SCHEDULES = (
    "verl-colocated", "rlinf-disaggregated", "one-step-off", "areal", "streamrl-async", "pipelinerl", "async-colocated",
    "rollpacker", "magistral", "rlhfuse", "asyncflow", "verl-fully-async-d",
)  # fmt: skip
QUICK = ("verl-colocated", "one-step-off", "areal", "async-colocated")
WORKLOADS: Mapping[str, Sequence[str]] = {
    "quickstart": ("quickstart",),
    "longtail": ("longtail",),
    "quickstart-large": ("quickstart", "prompts_per_step=32", "minibatches=1"),
    "longtail-few": ("longtail", "prompts_per_step=8", "samples_per_prompt=8"),
}
DOCS = Path(__file__).parent.parent / "docs"
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule of one workload on one cluster."""

    workload: str
    cluster: str
    schedule: str
    predicted_s: float
    measured_s: float
    predicted_rate: float
    """Trained tokens a second."""
    measured_rate: float

    @property
    def error(self) -> float:
        """Predicted against measured seconds, less 1."""
        return self.predicted_s / self.measured_s - 1


def rows_of(workload: str, cluster: str, names: Sequence[str], args: argparse.Namespace) -> list[Row]:
    """Profiles a workload, then predicts and measures it under each schedule."""
    spec, *changes = WORKLOADS[workload]
    where = f"cluster={{backend: {cluster}, devices: cpu:{args.devices}}}"
    recipe = load_recipe(spec, [*changes, where, "schedule=verl-colocated"])
    check_recipe(recipe)
    profile = profile_recipe(recipe, QuietProgress(), source="benchmarks/planner.py", budget_s=args.budget)
    still: Recipe = with_zero_lr(recipe, recipe.schedule.resolved)
    place = Workplace(recipe=still, simulation=Simulation(profile=profile, num_devices=num_devices(recipe)))
    found = []
    for name in names:
        schedule = load_schedule(name)
        predicted = place.score(schedule, Fidelity(steps=3 * args.steps))
        if not isinstance(predicted, Score):
            print(f"{workload} {cluster} {name}: {predicted.reason}")
            continue
        check_recipe(under(still, schedule, name))
        measured_s, rate = measure(still, schedule, num_steps=args.steps)
        row = Row(
            workload=workload, cluster=cluster, schedule=name, predicted_s=predicted.step_s, measured_s=measured_s,
            predicted_rate=predicted.tokens_per_s, measured_rate=rate,
        )  # fmt: skip
        print(
            f"{workload:18s}{cluster:7s}{name:22s}{row.predicted_s:8.3f}{row.measured_s:8.3f}{row.error:+7.0%}",
            flush=True,
        )
        found.append(row)
    return found


def tau(rows: Sequence[Row]) -> float:
    """Returns Kendall's tau of predicted and measured trained tokens a second."""
    pairs = list(combinations(rows, 2))
    agree = sum(
        1 if (one.predicted_rate - two.predicted_rate) * (one.measured_rate - two.measured_rate) > 0 else -1
        for one, two in pairs
    )
    return agree / len(pairs) if pairs else 1.0


def regret(rows: Sequence[Row]) -> float:
    """Returns how much longer a trained token takes under the schedule of best prediction than under the best."""
    chosen = max(rows, key=lambda row: row.predicted_rate)
    return max(row.measured_rate for row in rows) / chosen.measured_rate - 1


def summary(rows: Sequence[Row]) -> str:
    """Returns the table as Markdown: a line a workload and cluster, and one of all."""
    lines = ["| workload | cluster | schedules | median error | 95th percentile | Kendall's tau | regret | chosen |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    keys = dict.fromkeys((row.workload, row.cluster) for row in rows)
    for workload, cluster in keys:
        mine = [row for row in rows if (row.workload, row.cluster) == (workload, cluster)]
        chosen = max(mine, key=lambda row: row.predicted_rate).schedule
        lines.append(
            f"| {workload} | {cluster} | {len(mine)} | {_errors(mine)} | {tau(mine):.2f} | {regret(mine):.1%} "
            f"| `{chosen}` |"
        )
    groups = [[row for row in rows if (row.workload, row.cluster) == key] for key in keys]
    mean_tau, most = fmean(tau(group) for group in groups), max(regret(group) for group in groups)
    lines.append(f"| all | | {len(rows)} | {_errors(rows)} | {mean_tau:.2f} (mean) | {most:.1%} (most) | |")
    return "\n".join(lines)


def _errors(rows: Sequence[Row]) -> str:
    errors = sorted(abs(row.error) for row in rows)
    return f"{median(errors):.0%} | {errors[min(len(errors) - 1, round(0.95 * (len(errors) - 1)))]:.0%}"


def scatter(rows: Sequence[Row]) -> str:
    """Draws measured over predicted seconds, a colour a workload; the line is where both are equal."""
    plot = Plot(width=520.0, height=420.0)
    most = max(max(row.predicted_s, row.measured_s) for row in rows)
    ticks = nice_ticks(0.0, most, 5)
    x, y = plot.x_scale(0.0, ticks[-1]), plot.y_scale(0.0, ticks[-1])
    plot.grid(x, y, ticks, ticks)
    plot.path([(x(0.0), y(0.0)), (x(ticks[-1]), y(ticks[-1]))], "#9ca3af")
    for place, workload in enumerate(dict.fromkeys(row.workload for row in rows)):
        for row in (row for row in rows if row.workload == workload):
            tip = f"{row.workload}, {row.cluster}, {row.schedule}: {row.error:+.0%}"
            plot.dot(x(row.predicted_s), y(row.measured_s), COLOURS[place % len(COLOURS)], tip)
        plot.text(70, 30 + 15 * place, workload, "start")
        plot.dot(62, 26 + 15 * place, COLOURS[place % len(COLOURS)], workload)
    plot.x_title("predicted seconds a step; upwards: measured")
    figure = plot.render("measured over predicted seconds of a step")
    rules = "text{font:11px sans-serif;fill:#667085}.rule{stroke:#e6e9f0}.axis{stroke:#667085}.curve{fill:none}"
    style = f"<style>{rules}</style>"
    return figure.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{style}", 1)


def write(rows: Sequence[Row]) -> None:
    """Puts the table and the picture into the page."""
    write_table(
        DOCS / "planner.md", "measured", f"{summary(rows)}\n\n![measured over predicted seconds of a step](planner.svg)"
    )
    (DOCS / "planner.svg").write_text(scatter(rows) + "\n", encoding="utf-8")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four schedules, one workload, local, few steps")
    parser.add_argument("--drift", action="store_true", help="simulated: answers that grow, and the online planner")
    parser.add_argument("--clusters", default="local,ray")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="measured of each schedule")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of each profile")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="into docs/planner.md")
    args = parser.parse_args()
    if args.drift:
        table = drift_table()
        print(table)
        if args.write:
            write_table(DOCS / "planner.md", "drift", table)
        return
    clusters, workloads, names = (value.split(",") for value in (args.clusters, args.workloads, args.schedules))
    if args.quick:
        clusters, workloads, names, args.steps, args.budget = (
            ["local"],
            ["quickstart"],
            list(QUICK),
            4,
            10.0,
        )
    rows: list[Row] = []
    for cluster in clusters:
        for workload in workloads:
            rows += rows_of(workload, cluster, names, args)
            if args.json:
                args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    print(summary(rows))
    if args.write:
        write(rows)


if __name__ == "__main__":
    main()
