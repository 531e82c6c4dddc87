"""Points of the planner's comparison: predictions stored before their runs, measured ratios, and their table."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from _planner_workloads import list_words

from interlace.core.errors import UserError
from interlace.forecast.profile.probe import ProbeComparison, Speed, compare_schedules, measure, noise, num_devices
from interlace.forecast.profile.profile import profile_recipe, with_zero_lr
from interlace.forecast.profile.types import Profile
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation
from interlace.observe.progress import QuietProgress
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.config import DEFAULT_SCHEDULE, Recipe, set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule

MIN_STEPS = 4
"""Fewest measured steps of a schedule."""
SCORED_STEPS = 48
"""Simulated steps of a prediction."""
ROUNDS = 3
"""Further runs of the chosen and of the fastest schedule, in turn. The fastest of many noisy measurements is an
overestimate, so the regret is taken from these runs.
"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One schedule of one workload on one cluster, predicted and then measured."""

    workload: str
    cluster: str
    schedule: str
    prediction: str
    """Start of the SHA-256 of the prediction, which was written to the store before the run."""
    predicted: Speed
    predicted_reference: Speed
    measured: ProbeComparison

    @property
    def predicted_ratio(self) -> float:
        """Predicted trained tokens/s divided by the predicted ones of the reference."""
        return self.predicted.tokens_per_s / self.predicted_reference.tokens_per_s

    @property
    def error(self) -> float:
        """Predicted divided by measured ratio, minus 1."""
        return self.predicted_ratio / self.measured.ratio - 1

    @property
    def seconds_error(self) -> float:
        """Predicted divided by measured seconds of a step, minus 1."""
        return self.predicted.step_s / self.measured.speed.step_s - 1

    @classmethod
    def read(cls, row: Mapping[str, object]) -> "Point":
        """Reads a point from the store's file."""
        measured = {name: Speed(**speed) for name, speed in row["measured"].items()}  # type: ignore[attr-defined]
        speeds = {name: Speed(**row[name]) for name in ("predicted", "predicted_reference")}  # type: ignore[arg-type]
        return cls(**{**row, **speeds, "measured": ProbeComparison(**measured)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """Repeated runs of the schedule that the forecast chooses and of the one that was measured as the fastest."""

    workload: str
    cluster: str
    chosen: str
    fastest: str
    chosen_rates: Sequence[float]
    """Trained tokens per second of each run."""
    fastest_rates: Sequence[float]

    @property
    def regret(self) -> float:
        """Relative time per trained token that the choice costs."""
        return fmean(self.fastest_rates) / fmean(self.chosen_rates) - 1


class Store:
    """File of the profiles, predictions and points so far."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        kept = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
        self.predictions: dict[str, str] = kept.get("predictions", {})
        """SHA-256 of a prediction -> its text, as it was written before the run."""
        profiles = kept.get("profiles", {})
        self.profiles = {key: Profile.parse(value, where=str(path)) for key, value in profiles.items()}
        self.points = [Point.read(row) for row in kept.get("points", ())]
        self.confirmations = [Confirmation(**row) for row in kept.get("confirmations", ())]

    def has(self, workload: str, cluster: str, name: str) -> bool:
        """Returns whether a point was measured."""
        return any(point.schedule == name for point in self.points_of(workload, cluster))

    def points_of(self, workload: str, cluster: str) -> list[Point]:
        """Returns the points of a workload on a cluster."""
        return [point for point in self.points if (point.workload, point.cluster) == (workload, cluster)]

    def confirmation_of(self, workload: str, cluster: str) -> Confirmation | None:
        """Returns the repeated runs of a workload on a cluster; None without them."""
        found = [each for each in self.confirmations if (each.workload, each.cluster) == (workload, cluster)]
        return found[-1] if found else None

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
            content = {
                "profiles": {key: profile.model_dump(mode="json") for key, profile in self.profiles.items()},
                "predictions": self.predictions,
                "points": [asdict(point) for point in self.points],
                "confirmations": [asdict(each) for each in self.confirmations],
            }
            self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes of a measurement."""

    devices: int
    steps: int
    """Most measured steps of a schedule."""
    seconds: float
    """Approximate seconds of the measured steps."""
    budget_s: float
    """Seconds of a profile."""

    def num_steps(self, step_s: float) -> int:
        """Returns the measured steps of a schedule whose steps take so long."""
        return max(MIN_STEPS, min(self.steps, round(self.seconds / step_s)))


def recipe_of(workload: str, cluster: str, devices: int) -> Recipe:
    """Returns a workload's recipe on a cluster."""
    spec, *changes = list_words(workload)
    where = f"cluster={{backend: {cluster}, devices: cpu:{devices}}}"
    return load_recipe(spec, [*changes, where, f"schedule={DEFAULT_SCHEDULE}"])


class Bench:
    """Measures the schedules of one workload on one cluster."""

    def __init__(self, store: Store, workload: str, cluster: str, effort: Effort) -> None:
        """Profiles the workload unless the store has its profile. Raises UserError if it cannot run here."""
        self._store, self._workload, self._cluster, self._effort = store, workload, cluster, effort
        recipe, key = recipe_of(workload, cluster, effort.devices), f"{workload} {cluster}"
        check_recipe(recipe)
        if key not in store.profiles:
            store.profiles[key] = profile_recipe(
                recipe, QuietProgress(), source="benchmarks/planner.py", budget_s=effort.budget_s
            )
            store.save()
        self._recipe: Recipe = with_zero_lr(recipe, recipe.schedule.resolved)
        simulation = Simulation(profile=store.profiles[key], num_devices=num_devices(recipe))
        self._place = Workplace(recipe=self._recipe, simulation=simulation)

    def _score(self, name: str) -> Score:
        """Predicts a schedule. Raises UserError if it cannot run."""
        schedule = load_schedule(name)
        check_recipe(set_schedule(self._recipe, schedule, name))
        score = self._place.score(schedule, Fidelity(steps=SCORED_STEPS))
        if not isinstance(score, Score):
            raise UserError(f"{name}: {score.reason if score else 'not simulated'}")
        return score

    def measure_points(self, names: Sequence[str], most: int) -> int:
        """Predicts and measures missing schedules, `most` at most; each is stored immediately. Returns their number."""
        scores: dict[str, Score] = {}
        for name in names:
            if name == DEFAULT_SCHEDULE or self._store.has(self._workload, self._cluster, name) or len(scores) == most:
                continue
            try:
                scores[name] = self._score(name)
            except UserError as error:  # a part that is not on this machine, or a schedule that the recipe refuses
                print(f"{self._workload} {self._cluster} {name}: {error}", flush=True)
        if not scores:
            return 0
        reference = self._score(DEFAULT_SCHEDULE)
        hashes = {
            name: self._store.predict((self._workload, self._cluster, name), each) for name, each in scores.items()
        }
        num_steps = self._effort.num_steps(reference.step_s)
        compared = compare_schedules(self._recipe, [load_schedule(name) for name in scores], num_steps=num_steps)
        for (name, score), comparison in zip(scores.items(), compared, strict=True):
            point = Point(
                workload=self._workload, cluster=self._cluster, schedule=name, prediction=hashes[name],
                predicted=_speed_of(score), predicted_reference=_speed_of(reference),
                measured=comparison,
            )  # fmt: skip
            self._store.points.append(point)
            self._store.save()
            print(
                f"{self._workload:18s}{self._cluster:7s}{name:22s} ratio {point.predicted_ratio:6.2f} predicted, "
                f"{comparison.ratio:6.2f} measured {point.error:+.0%}; reference {comparison.drift:+.0%}; seconds "
                f"{score.step_s:.3f}, {comparison.speed.step_s:.3f}",
                flush=True,
            )
        return len(scores)

    def predict_again(self, names: Sequence[str]) -> None:
        """Predicts stored points of these schedules with the stored profile and the present simulator, and prints the
        ratios. Stores nothing.
        """
        reference = _speed_of(self._score(DEFAULT_SCHEDULE))
        for point in self._store.points_of(self._workload, self._cluster):
            if point.schedule in names:
                again = replace(point, predicted=_speed_of(self._score(point.schedule)), predicted_reference=reference)
                print(
                    f"{self._workload:18s}{self._cluster:7s}{point.schedule:22s} ratio {point.measured.ratio:6.2f} "
                    f"measured, {point.predicted_ratio:6.2f} predicted {point.error:+.0%}, "
                    f"{again.predicted_ratio:6.2f} again {again.error:+.0%}",
                    flush=True,
                )

    def confirm(self) -> None:
        """Runs the chosen schedule and the fastest one in turn, if they differ."""
        points = self._store.points_of(self._workload, self._cluster)
        if self._store.confirmation_of(self._workload, self._cluster) or not points:
            return
        chosen, fastest = choose(points), find_fastest(points)
        rates: dict[str, list[float]] = {chosen: [], fastest: []}
        steps = self._effort.num_steps(points[0].predicted_reference.step_s)
        for name in [chosen, fastest] * ROUNDS if chosen != fastest else [chosen]:
            rates[name].append(measure(self._recipe, load_schedule(name), num_steps=steps).tokens_per_s)
        found = Confirmation(
            workload=self._workload, cluster=self._cluster, chosen=chosen, fastest=fastest,
            chosen_rates=rates[chosen], fastest_rates=rates[fastest],
        )  # fmt: skip
        self._store.confirmations.append(found)
        self._store.save()
        print(
            f"{self._workload} {self._cluster}: chosen {chosen}, fastest {fastest}, regret {found.regret:.1%}",
            flush=True,
        )


def _speed_of(score: Score) -> Speed:
    return Speed(step_s=score.step_s, tokens_per_s=score.tokens_per_s)


def choose(points: Sequence[Point]) -> str:
    """Returns the schedule with the fastest prediction, which the planner chooses."""
    fastest = max(points, key=lambda point: point.predicted_ratio)
    return fastest.schedule if fastest.predicted_ratio > 1 else DEFAULT_SCHEDULE


def find_fastest(points: Sequence[Point]) -> str:
    """Returns the schedule with the largest measured ratio."""
    fastest = max(points, key=lambda point: point.measured.ratio)
    return fastest.schedule if fastest.measured.ratio > 1 else DEFAULT_SCHEDULE


def tau(points: Sequence[Point]) -> float | None:
    """Returns Kendall's tau over the pairs of schedules whose measured ratios differ by more than the noise.

    The reference is one of the schedules. None if no pair differs by more.
    """
    apart = noise([point.measured for point in points])
    ratios = [(1.0, 1.0), *((point.predicted_ratio, point.measured.ratio) for point in points)]
    pairs = [(one, two) for one, two in combinations(ratios, 2) if abs(math.log(one[1] / two[1])) > apart]
    agree = sum(1 if (one[0] - two[0]) * (one[1] - two[1]) > 0 else -1 for one, two in pairs)
    return agree / len(pairs) if pairs else None


def summarize(store: Store) -> str:
    """Returns the table as Markdown: one line per workload and cluster, and one for all."""
    names = ("workload", "schedules", "noise", "error of ratios, median", "95th percentile", "error of seconds, median",
             "Kendall's tau", "regret")  # fmt: skip
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    taus, regrets = list[float](), list[float]()
    for workload, cluster in dict.fromkeys((point.workload, point.cluster) for point in store.points):
        points = store.points_of(workload, cluster)
        found = tau(points)
        told = store.confirmation_of(workload, cluster)
        taus += [found] if found is not None else []
        regrets += [told.regret] if told else []
        cells = (
            workload if cluster == "local" else f"{workload}, {cluster}", str(len(points) + 1),
            f"{noise([each.measured for each in points]):.0%}", *_errors([each.error for each in points]),
            _errors([each.seconds_error for each in points])[0], f"{found:.2f}" if found is not None else "tie",
            f"{told.regret:.1%}" if told else "-",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    total = (
        "all", str(len(store.points)), f"{noise([each.measured for each in store.points]):.0%}",
        *_errors([each.error for each in store.points]), _errors([each.seconds_error for each in store.points])[0],
        f"{fmean(taus):.2f} (mean)" if taus else "-", f"{max(regrets):.1%} (most)" if regrets else "-",
    )  # fmt: skip
    return "\n".join([*lines, f"| {' | '.join(total)} |"])


def _errors(errors: Sequence[float]) -> tuple[str, str]:
    """Returns the median and the 95th percentile of the sizes of errors."""
    sizes = sorted(map(abs, errors))
    return f"{median(sizes):.0%}", f"{sizes[round(0.95 * (len(sizes) - 1))]:.0%}"
