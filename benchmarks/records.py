"""A measured profile against a profile from a run's records: the quality of their predictions of schedules.

    python benchmarks/records.py [--recipe quickstart] [--schedules areal,...] [--steps 30] [--json F] [--write]

One run under `verl-colocated` is recorded, and the recipe is profiled afterwards. Then each schedule is simulated with
both profiles, and trained. --write puts the table into RESULTS.md.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

from _page import write_table

from interlace.forecast.profile.from_run import profile_of_run
from interlace.forecast.profile.probe import measure, num_devices, train_probe
from interlace.forecast.profile.profile import profile_recipe, with_zero_lr
from interlace.forecast.profile.types import Profile
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation
from interlace.observe.progress import QuietProgress
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.config import Recipe, set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule

RECORDED = "verl-colocated"
SCHEDULES = (RECORDED, "one-step-off", "areal", "pipelinerl", "async-colocated")


def recorded(recipe: Recipe, steps: int) -> Profile:
    """Trains for some steps and returns the profile of the records."""
    settings = set_schedule(recipe, load_schedule(RECORDED), RECORDED).model_copy(
        update={"steps": steps, "eval_every": 0, "checkpoint_every": 0}
    )
    with train_probe(settings) as folder:
        return profile_of_run(folder)[1]


def predicted_s(recipe: Recipe, profile: Profile, name: str, steps: int) -> float:
    """Returns the simulated seconds of a step."""
    place = Workplace(recipe=recipe, simulation=Simulation(profile=profile, num_devices=num_devices(recipe)))
    score = place.score(load_schedule(name), Fidelity(steps=steps))
    if not isinstance(score, Score):
        raise ValueError(f"{name} cannot run: {score.reason}")
    return score.step_s


def main() -> None:
    """Runs the comparison; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--steps", type=int, default=30, help="of the recorded run, and measured of each schedule")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of the profile")
    parser.add_argument("--json", type=Path, help="also write the errors there, by schedule: measured profile, run's")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    recipe = load_recipe(args.recipe, [f"schedule={RECORDED}"])
    check_recipe(recipe)
    recipe = with_zero_lr(recipe, recipe.schedule.resolved)
    of_run = recorded(recipe, args.steps)
    measured = profile_recipe(recipe, QuietProgress(), source="benchmarks/records.py", budget_s=args.budget)
    lines = ["| schedule | measured s | error of the measured profile | error of the run's profile |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    errors: list[tuple[float, float]] = []
    for name in args.schedules.split(","):
        found = [predicted_s(recipe, profile, name, args.steps) for profile in (measured, of_run)]
        real_s = measure(recipe, load_schedule(name), num_steps=args.steps).step_s
        one, two = (each / real_s - 1 for each in found)
        errors.append((abs(one), abs(two)))
        lines.append(f"| `{name}` | {real_s:.3f} | {one:+.0%} | {two:+.0%} |")
        print(lines[-1], flush=True)
    means = [fmean(each) for each in zip(*errors, strict=True)]
    lines.append(f"| mean error | | {means[0]:.0%} | {means[1]:.0%} |")
    print(lines[-1])
    if args.json:
        args.json.write_text(json.dumps(dict(zip(args.schedules.split(","), errors, strict=True))) + "\n")
    if args.write:
        write_table(Path(__file__).parent / "RESULTS.md", "records", "\n".join(lines))


if __name__ == "__main__":
    main()
