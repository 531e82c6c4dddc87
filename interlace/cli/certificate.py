"""`interlace doctor --equivalence`: checks that a recipe trains alike under every synchronous schedule."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from interlace.cli.preflight import disable_progress_bars, keep_after_error, say

if TYPE_CHECKING:
    from interlace.run.equivalence import Trial
    from interlace.run.recipe.config import Recipe


def certify_recipe(spec: str, overrides: Sequence[str]) -> bool:
    """Trains a recipe at toy size under each schedule and prints the comparison. Returns False if results differ."""
    from interlace.observe.stop import StopSignal
    from interlace.run import equivalence
    from interlace.run.recipe.load import load_recipe

    disable_progress_bars()
    console = Console()
    recipes = equivalence.variants(equivalence.toy(load_recipe(spec, overrides)))
    small = next(iter(recipes.values()))
    say(console, f"{spec} at toy size: {_format_sizes(small)}")
    trials: list[Trial] = []
    with (
        StopSignal(lambda: console.print("Stopping at the end of this step.")) as stop,
        console.status("") as status,
        keep_after_error("interlace-doctor-", stop) as folder,
    ):
        names = iter(recipes)
        status.update(f"training under schedule {next(names)!r}")
        for trial in equivalence.certify(recipes, folder, stop):
            trials.append(trial)
            if not trial.moved:
                break  # further runs could not show a difference either
            status.update(f"training under schedule {next(names, '')!r}")
    console.print(_make_table(trials))
    verdict = "\n".join(_list_verdict(trials))
    say(console, verdict)
    return trials[0].moved > 0 and all(trial.holds for trial in trials)


def _format_sizes(recipe: "Recipe") -> str:
    warmup = " after its warm-up" if recipe.warmup else ""
    return (
        f"{recipe.steps} steps of {recipe.prompts_per_step} prompts x {recipe.samples_per_prompt} samples of at most "
        f"{recipe.sampling.max_new_tokens} tokens{warmup}, {recipe.cluster.devices} on cluster {recipe.cluster.backend}"
    )


def _make_table(trials: Sequence["Trial"]) -> Table:
    table = Table(title="Synchronous schedules", title_justify="left")
    for heading in ("schedule", "samples", "identical", "largest weight difference", ""):
        table.add_column(heading, justify="left" if heading in ("schedule", "") else "right")
    for trial in trials:
        difference = "0, to the bit" if trial.difference == 0 else f"{trial.difference:.1e}"
        table.add_row(
            trial.schedule,
            str(trial.num_samples),
            "yes" if trial.same_samples else "no",
            difference,
            Text("ok", "green") if trial.holds else Text("FAIL", "red"),
        )
    return table


def _list_verdict(trials: Sequence["Trial"]) -> Iterator[str]:
    from interlace.run.equivalence import TOLERANCE

    moved, failed = trials[0].moved, [trial.schedule for trial in trials if not trial.holds]
    if moved == 0:
        yield (
            "Not shown: no weight moved, so nothing was learned that could differ. At this size the samples of a "
            "prompt were all worth the same; try a reward that tells short or poor answers apart."
        )
    elif failed:
        yield (
            f"Not equivalent: {', '.join(failed)}. Something in it depends on the order or the time of things: a "
            "reward that is not a function of its sample, one that times out, or a model whose rows depend on what "
            "shares their batch (`interlace train` says so at its start)."
        )
    else:
        yield (
            f"Equivalent. Weights moved by up to {moved:.1e}, and a difference of {TOLERANCE:.0%} of that is allowed: "
            "where granules are smaller than a step, the same numbers are summed in another order."
        )
