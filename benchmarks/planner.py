"""Predicted against measured step time of many schedules, the ranking by predictions, and the loss of a choice.

    python benchmarks/planner.py [--quick] [--clusters local,ray] [--workloads quickstart,longtail] [--write]
    python benchmarks/planner.py --points 16 [--store docs/planner.json] [--write]
    python benchmarks/planner.py --drift [--write]
    python benchmarks/planner.py --live [--write]
    python benchmarks/planner.py --mixed [--write]
    python benchmarks/planner.py --lending [--write]
    python benchmarks/planner.py --time [--write]
    python benchmarks/planner.py --robots [--write]

Each recipe is profiled once on each cluster. Then every schedule is simulated, and trained for some steps with a
learning rate near 0, so that lengths stay constant. The prediction is written to the store, under its hash, before its
run. There are twelve workloads; the last one is drawn from a seed, and --workloads random-SEED draws another. --store
keeps profiles and points, which are not measured again: --points N measures N more and ends. A table may thus combine
several sessions, with a profile from another hour than most of its points. `tau` is Kendall's, over the schedules of
one recipe on one cluster. `regret` is the measured time per trained token of the schedule with the best prediction,
relative to the best measured one. --write puts the table into docs/planner.md and the picture next to the page.
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from _page import write_table
from _planner_drift import drift_table
from _planner_lending import lending_table
from _planner_live import live_table
from _planner_mixed import mixed_table
from _planner_robots import robots_table
from _planner_time import time_table
from _planner_workloads import NAMES, POINTS, list_words

from interlace.core.errors import UserError
from interlace.forecast.profile.probe import measure, num_devices
from interlace.forecast.profile.profile import profile_recipe, with_zero_lr
from interlace.forecast.profile.types import Profile
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation
from interlace.forecast.svg import Plot, nice_ticks
from interlace.observe.progress import QuietProgress
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.config import Recipe, set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule

SCHEDULES = (
    "verl-colocated", "rlinf-disaggregated", "one-step-off", "areal", "streamrl-async", "pipelinerl", "async-colocated",
    "rollpacker", "magistral", "rlhfuse", "asyncflow", "verl-fully-async-d",
)  # fmt: skip
QUICK = ("verl-colocated", "one-step-off", "areal", "async-colocated")
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
    """Predicted trained tokens per second."""
    measured_rate: float
    prediction: str = ""
    """Start of the SHA-256 of the prediction, which was written to the store before the run; empty if none was."""

    @property
    def error(self) -> float:
        """Predicted divided by measured seconds, minus 1."""
        return self.predicted_s / self.measured_s - 1


class Store:
    """File of the profiles and points so far."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        kept = (
            json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {"profiles": {}, "points": []}
        )
        self.predictions: dict[str, str] = kept.get("predictions", {})
        """SHA-256 of a prediction -> its text, as it was written before the run."""
        self.profiles = {key: Profile.parse(value, where=str(path)) for key, value in kept["profiles"].items()}
        self.rows = [Row(**point) for point in kept["points"]]

    def has(self, workload: str, cluster: str, name: str) -> bool:
        """Returns whether a point was measured, or failed."""
        return any((row.workload, row.cluster, row.schedule) == (workload, cluster, name) for row in self.rows)

    def predict(self, point: tuple[str, str, str], score: Score) -> str:
        """Writes a prediction before its run. Returns the start of its hash."""
        workload, cluster, name = point
        content = {"workload": workload, "cluster": cluster, "schedule": name, "score": asdict(score)}
        text = json.dumps(content, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        self.predictions[key] = text
        self.save()
        return key[:16]

    def save(self) -> None:
        """Writes the file."""
        if self._path:
            profiles = {key: profile.model_dump(mode="json") for key, profile in self.profiles.items()}
            points = [asdict(row) for row in self.rows]
            content = {"profiles": profiles, "predictions": self.predictions, "points": points}
            text = json.dumps(content, indent=1)
            self._path.write_text(text + "\n", encoding="utf-8")


def recipe_of(workload: str, cluster: str, devices: int) -> Recipe:
    """Returns a workload's recipe on a cluster."""
    spec, *changes = list_words(workload)
    where = f"cluster={{backend: {cluster}, devices: cpu:{devices}}}"
    return load_recipe(spec, [*changes, where, "schedule=verl-colocated"])


def measure_points(store: Store, wanted: Sequence[tuple[str, str, str]], args: argparse.Namespace) -> None:
    """Predicts and measures missing points, at most args.points of them; each is stored immediately."""
    left = args.points
    for workload, cluster, name in wanted:
        if store.has(workload, cluster, name):
            continue
        if left == 0:
            return
        left -= 1
        try:
            row = _measure_point(store, (workload, cluster, name), args)
        except UserError as error:  # a part that is not on this machine, or a schedule that the recipe refuses
            print(f"{workload} {cluster} {name}: {error}", flush=True)
            continue
        if row:
            store.rows.append(row)
            store.save()


def _measure_point(store: Store, point: tuple[str, str, str], args: argparse.Namespace) -> Row | None:
    workload, cluster, _ = point
    recipe, key = recipe_of(workload, cluster, args.devices), f"{workload} {cluster}"
    check_recipe(recipe)
    if key not in store.profiles:
        store.profiles[key] = profile_recipe(
            recipe, QuietProgress(), source="benchmarks/planner.py", budget_s=args.budget
        )
        store.save()
    return _measured(recipe, store, point, args.steps)


def _measured(recipe: Recipe, store: Store, point: tuple[str, str, str], steps: int) -> Row | None:
    """Predicts and measures a schedule; None if it cannot be predicted. Raises UserError if it cannot run."""
    workload, cluster, name = point
    profile = store.profiles[f"{workload} {cluster}"]
    still: Recipe = with_zero_lr(recipe, recipe.schedule.resolved)
    place = Workplace(recipe=still, simulation=Simulation(profile=profile, num_devices=num_devices(recipe)))
    schedule = load_schedule(name)
    predicted = place.score(schedule, Fidelity(steps=3 * steps))
    if not isinstance(predicted, Score):
        print(f"{workload} {cluster} {name}: {predicted.reason}")
        return None
    check_recipe(set_schedule(still, schedule, name))
    prediction = store.predict(point, predicted)
    measured_s, rate = measure(still, schedule, num_steps=steps)
    row = Row(
        workload=workload, cluster=cluster, schedule=name, predicted_s=predicted.step_s, measured_s=measured_s,
        predicted_rate=predicted.tokens_per_s, measured_rate=rate, prediction=prediction,
    )  # fmt: skip
    print(
        f"{workload:18s}{cluster:7s}{name:22s}{row.predicted_s:8.3f}{row.measured_s:8.3f}{row.error:+7.0%}",
        flush=True,
    )
    return row


def tau(rows: Sequence[Row]) -> float:
    """Returns Kendall's tau of predicted and measured trained tokens per second."""
    pairs = list(combinations(rows, 2))
    agree = sum(
        1 if (one.predicted_rate - two.predicted_rate) * (one.measured_rate - two.measured_rate) > 0 else -1
        for one, two in pairs
    )
    return agree / len(pairs) if pairs else 1.0


def regret(rows: Sequence[Row]) -> float:
    """Returns the relative time per trained token of the best predicted schedule against the best measured one."""
    chosen = max(rows, key=lambda row: row.predicted_rate)
    return max(row.measured_rate for row in rows) / chosen.measured_rate - 1


def summary(rows: Sequence[Row]) -> str:
    """Returns the table as Markdown: one line per workload and cluster, and one for all."""
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
    """Draws measured over predicted seconds, with one colour per workload; on the line both are equal."""
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
    """Writes the table and the picture into the page."""
    write_table(
        DOCS / "planner.md", "measured", f"{summary(rows)}\n\n![measured over predicted seconds of a step](planner.svg)"
    )
    (DOCS / "planner.svg").write_text(scatter(rows) + "\n", encoding="utf-8")


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
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="measured of each schedule")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of each profile")
    parser.add_argument("--store", type=Path, help="file of the points; default with --points: docs/planner.json")
    parser.add_argument("--points", type=int, default=-1, help="measure at most so many more")
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
    store = Store(args.store or (DOCS / "planner.json" if args.points >= 0 else None))
    wanted = [(workload, cluster, name) for cluster in clusters for workload in workloads for name in names
              if (cluster, workload) in POINTS or workload not in NAMES]  # fmt: skip
    measure_points(store, wanted, args)
    print(f"{sum(store.has(*point) for point in wanted)} of {len(wanted)} points are there")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in store.rows]) + "\n", encoding="utf-8")
    if store.rows:
        print(summary(store.rows))
        if args.write:
            write(store.rows)


if __name__ == "__main__":
    main()
