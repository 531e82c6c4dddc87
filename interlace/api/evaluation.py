"""Held-out accuracy of a run or a model."""

from collections.abc import Sequence

from rich.console import Console

from interlace.cli.eval import evaluated_recipe
from interlace.cli.preflight import hush_libraries
from interlace.observe.progress import open_progress
from interlace.run.evaluation import Evaluation


def evaluate_spec(spec: str, recipe: str | None, overrides: Sequence[str], *, quiet: bool) -> Evaluation:
    """Evaluates what `spec` names: a run, a checkpoint or a model. recipe: None takes the run's. UserError."""
    hush_libraries()
    settings = evaluated_recipe(spec, recipe, overrides)
    from interlace.run.evaluate_model import evaluate_model  # loads torch: a bad recipe has been refused

    with open_progress(Console(quiet=quiet), num_steps=0, quiet=quiet) as progress:
        return evaluate_model(settings, progress)
