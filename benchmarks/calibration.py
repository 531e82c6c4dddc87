"""Predicted against measured step time: a recipe profiled, simulated and run under several schedules, in one go.

For each cluster back end: the workers are profiled, then three schedules are trained for some steps, then the workers
are profiled again, and so on; the prediction is the mean of what the simulator makes of the profiles before and after.
The learning rate is next to nothing, so that lengths stay what they were when profiled. The first steps fill the
pipeline and are left out of both sides; of the rest the slowest and quickest tenth too.

Beside it all a process times the same few milliseconds of work over and over. Where the machine is shared, that says
how much slower it was during a run than during a profile: `corrected` is the prediction times that ratio.

    python benchmarks/calibration.py [--recipe quickstart] [--clusters local,ray] [--devices 2] [--schedules ...]
        [--steps 14] [--rounds 1] [--json calibration.json]
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from interlace.core.profile import Profile
from interlace.jobs.simulate import Simulation, simulate
from interlace.jobs.train import train
from interlace.observe.progress import QuietProgress
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.profiling.profile import profile_recipe
from interlace.recipes.check import check_recipe
from interlace.recipes.config import Recipe
from interlace.recipes.load import load_recipe

T = TypeVar("T")
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
    corrected_s: float
    """The prediction at the speed that the machine had during the run."""
    error: float
    """corrected / measured - 1."""
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


class Pacer:
    """Times a fixed piece of work in a process of its own, ten times a second or so."""

    CODE = """
import sys, time
while True:
    start = time.perf_counter()
    total = 0
    for number in range(60000):
        total += number * number
    print(start, time.perf_counter() - start, flush=True)
    time.sleep(0.1)
"""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []

    def __enter__(self) -> "Pacer":
        self._process = subprocess.Popen([sys.executable, "-c", self.CODE], stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            start_s, took_s = line.split()
            self._seen.append((float(start_s), float(took_s)))

    def during(self, work: Callable[[], T]) -> tuple[T, float]:
        """(what it gives, mean seconds of the fixed work meanwhile)."""
        start_s = time.perf_counter()
        result = work()
        end_s = time.perf_counter()
        return result, fmean([took_s for at_s, took_s in self._seen if start_s <= at_s <= end_s] or [1.0])


def calibrate(
    args: argparse.Namespace, pacer: Pacer, cluster: str, root: Path
) -> Iterator[tuple[list[Row], list[Profile]]]:
    """One round on one back end: a few schedules at a time, each few between two profiles."""
    settings = [*STILL, f"steps={args.steps}", f"cluster={{backend: {cluster}, devices: cpu:{args.devices}}}"]
    recipes = {
        name: load_recipe(args.recipe, [*settings, *args.set, f"schedule={name}"]) for name in args.schedules.split(",")
    }
    for recipe in recipes.values():
        check_recipe(recipe)
    names = list(recipes)

    def profiled() -> Profile:
        return profile_recipe(recipes[names[0]], QuietProgress(), budget_s=args.budget)

    before = pacer.during(profiled)
    for start in range(0, len(names), BETWEEN_PROFILES):
        chunk = names[start : start + BETWEEN_PROFILES]
        found = {name: pacer.during(lambda name=name: measured(recipes[name], root)) for name in chunk}  # type: ignore[misc]
        after = pacer.during(profiled)
        rows = [row_of(cluster, name, recipes[name], found[name], (before, after), args.devices) for name in chunk]
        yield rows, [before[0], after[0]]
        before = after


def row_of(
    cluster: str,
    name: str,
    recipe: Recipe,
    run: tuple[Mapping[str, float], float],
    profiles: Sequence[tuple[Profile, float]],
    num_devices: int,
) -> Row:
    """run, profiles: each with the pace of the machine."""
    real, pace = run
    said, corrected = [], []
    for profile, profile_pace in profiles:
        each = seconds_of(simulate(recipe, Simulation(profile=profile, num_devices=num_devices)).run)
        said.append(each)
        corrected.append({part: seconds * pace / profile_pace for part, seconds in each.items()})
    at_pace = mean(corrected)
    return Row(
        cluster=cluster,
        schedule=name,
        measured_s=real["step"],
        predicted_s=mean(said)["step"],
        corrected_s=at_pace["step"],
        error=at_pace["step"] / real["step"] - 1,
        parts={part: (real[part], at_pace[part]) for part in PARTS},
    )


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
        measured_s, corrected_s = fmean(row.measured_s for row in same), fmean(row.corrected_s for row in same)
        parts = {
            part: (fmean(row.parts[part][0] for row in same), fmean(row.parts[part][1] for row in same))
            for part in PARTS
        }
        merged.append(
            Row(
                cluster=cluster,
                schedule=schedule,
                measured_s=measured_s,
                predicted_s=fmean(row.predicted_s for row in same),
                corrected_s=corrected_s,
                error=corrected_s / measured_s - 1,
                parts=parts,
            )
        )
    return merged


def show(rows: Sequence[Row]) -> None:
    """As a table; of parts, measured/corrected."""
    heading = f"{'cluster':8}{'schedule':24}{'measured':>10}{'predicted':>10}{'corrected':>10}{'error':>8}"
    print(heading, end="")
    print("".join(f"{part:>18}" for part in PARTS))
    for row in rows:
        parts = "".join(f"{real:>9.3f}/{said:<8.3f}" for real, said in row.parts.values())
        seconds = f"{row.measured_s:>10.3f}{row.predicted_s:>10.3f}{row.corrected_s:>10.3f}"
        print(f"{row.cluster:8}{row.schedule:24}{seconds}{row.error:>+8.0%}{parts}")
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
    with tempfile.TemporaryDirectory() as folder, one_ray(clusters), Pacer() as pacer:
        for cluster in clusters * args.rounds:
            for found, made in calibrate(args, pacer, cluster, Path(folder)):
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
