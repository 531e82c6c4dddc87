"""Predicted against measured step time: a recipe profiled, simulated and run under several schedules, in one go.

For each cluster back end: the workers are profiled, then three schedules are trained for some steps, then the workers
are profiled again, and so on; the prediction is the mean of what the simulator makes of the profiles before and after,
so a machine whose load drifts drifts in both. The learning rate is next to nothing, so that lengths stay what they were
when profiled. The first steps fill the pipeline and are left out of both sides; of the rest the slowest and quickest
tenth too.

    python benchmarks/calibration.py [--recipe quickstart] [--clusters local,ray] [--devices 2] [--schedules ...]
        [--steps 14] [--rounds 1] [--json calibration.json]
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from interlace.core.profile import Profile
from interlace.observe.progress import QuietProgress
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.recipes.check import check_recipe
from interlace.recipes.config import Recipe
from interlace.recipes.load import load_recipe
from interlace.recipes.profile import profile_recipe
from interlace.recipes.session import train
from interlace.recipes.simulate import Simulation, simulate

SCHEDULES = (
    "verl-colocated", "rlinf-disaggregated", "one-step-off", "areal", "streamrl-async", "pipelinerl", "async-colocated",
)  # fmt: skip
PARTS = ("rollout", "train")
"""Of a step, whose busy seconds are shown beside: `timing_s/...`."""
FILLING, CUT_SHARE, GOOD = 4, 0.1, 0.15
BETWEEN_PROFILES = 3
"""Schedules."""
STILL = ("optimizer={lr: 1e-12}", "evaluation={num_prompts: 1, samples_per_prompt: 0}", "logging.loggers=[]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One schedule on one cluster. Seconds of a step."""

    cluster: str
    schedule: str
    measured_s: float
    predicted_s: float
    error: float
    """predicted / measured - 1."""
    parts: Mapping[str, tuple[float, float]]
    """(measured, predicted) busy seconds a step of each part."""


def trimmed_mean(values: Sequence[float]) -> float:
    """Without the largest and smallest tenth."""
    ordered = sorted(values)
    cut = int(CUT_SHARE * len(ordered))
    return fmean(ordered[cut : len(ordered) - cut])


def seconds_of(run: RunData) -> dict[str, float]:
    """Of the step and its parts, once the pipeline is full."""
    return {name: trimmed_mean(run.values(f"timing_s/{name}")[FILLING:]) for name in ("step", *PARTS)}


def measured(recipe: Recipe, root: Path) -> dict[str, float]:
    """Of a real run."""
    folder = RunFolder.create(root, f"run-{len(list(root.iterdir()))}")
    folder.write_config(recipe)
    train(recipe, folder, resume=False, progress=QuietProgress(), stop=StopSignal(lambda: None))
    return seconds_of(RunData.read(folder))


def mean(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each name."""
    return {name: fmean(each[name] for each in parts) for name in parts[0]}


def calibrate(args: argparse.Namespace, cluster: str, root: Path) -> Iterator[tuple[list[Row], list[Profile]]]:
    """One round on one back end: a few schedules at a time, each few between two profiles."""
    settings = [*STILL, f"steps={args.steps}", f"cluster={{backend: {cluster}, devices: cpu:{args.devices}}}"]
    recipes = {
        name: load_recipe(args.recipe, [*settings, *args.set, f"schedule={name}"]) for name in args.schedules.split(",")
    }
    for recipe in recipes.values():
        check_recipe(recipe)
    names = list(recipes)
    before = profile_recipe(recipes[names[0]], QuietProgress(), budget_s=args.budget)
    for start in range(0, len(names), BETWEEN_PROFILES):
        chunk = names[start : start + BETWEEN_PROFILES]
        found = {name: measured(recipes[name], root) for name in chunk}
        after = profile_recipe(recipes[names[0]], QuietProgress(), budget_s=args.budget)
        simulations = [Simulation(profile=profile, num_devices=args.devices) for profile in (before, after)]
        rows = []
        for name in chunk:
            predicted = mean([seconds_of(simulate(recipes[name], each).run) for each in simulations])
            rows.append(
                Row(
                    cluster=cluster,
                    schedule=name,
                    measured_s=found[name]["step"],
                    predicted_s=predicted["step"],
                    error=predicted["step"] / found[name]["step"] - 1,
                    parts={part: (found[name][part], predicted[part]) for part in PARTS},
                )
            )
        yield rows, [before, after]
        before = after


@contextlib.contextmanager
def one_ray(clusters: Sequence[str]) -> Iterator[None]:
    """Ray is started once, not for every run: each run then joins it."""
    if "ray" not in clusters:
        yield
        return
    from interlace.recipes.clusters.local import this_machine
    from interlace.runtime.ray.session import RaySession

    session = RaySession.open(None, this_machine())
    try:
        yield
    finally:
        session.close()


def over_rounds(rows: Sequence[Row]) -> list[Row]:
    """One row for each schedule on each cluster: the means of its rounds."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.cluster, row.schedule), []).append(row)
    merged = []
    for (cluster, schedule), same in found.items():
        measured_s, predicted_s = fmean(row.measured_s for row in same), fmean(row.predicted_s for row in same)
        parts = {
            part: (fmean(row.parts[part][0] for row in same), fmean(row.parts[part][1] for row in same))
            for part in PARTS
        }
        merged.append(
            Row(
                cluster=cluster,
                schedule=schedule,
                measured_s=measured_s,
                predicted_s=predicted_s,
                error=predicted_s / measured_s - 1,
                parts=parts,
            )
        )
    return merged


def show(rows: Sequence[Row]) -> None:
    """As a table; of parts, measured/predicted."""
    print(f"{'cluster':8}{'schedule':24}{'measured':>10}{'predicted':>10}{'error':>8}", end="")
    print("".join(f"{part:>18}" for part in PARTS))
    for row in rows:
        parts = "".join(f"{real:>9.3f}/{said:<8.3f}" for real, said in row.parts.values())
        print(
            f"{row.cluster:8}{row.schedule:24}{row.measured_s:>10.3f}{row.predicted_s:>10.3f}{row.error:>+8.0%}{parts}"
        )
    good = sum(abs(row.error) <= GOOD for row in rows)
    print(f"{good} of {len(rows)} within {GOOD:.0%}; mean absolute error {fmean(abs(row.error) for row in rows):.0%}")


def earlier(path: Path | None) -> list[Row]:
    """Rounds of earlier calls."""
    if path is None or not path.exists():
        return []
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rounds"]]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--clusters", default="local,ray")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of each profile")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the recipe to change")
    parser.add_argument("--json", type=Path, help="written; rounds that are in it already count too")
    args = parser.parse_args()
    clusters = args.clusters.split(",")
    rows = earlier(args.json)
    profiles: list[Profile] = []
    with tempfile.TemporaryDirectory() as folder, one_ray(clusters):
        for cluster in clusters * args.rounds:
            for found, made in calibrate(args, cluster, Path(folder)):
                rows += found
                profiles += made
                if args.json:
                    write(args.json, rows, profiles)
    show(over_rounds(rows))


def write(path: Path, rows: Sequence[Row], profiles: Sequence[Profile]) -> None:
    """After every few schedules: what was measured is kept, also where the command is ended."""
    written = {
        "rows": [asdict(row) for row in over_rounds(rows)],
        "rounds": [asdict(row) for row in rows],
        "profiles": [each.model_dump() for each in profiles],
    }
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
