"""`interlace serve --policy`: serves a robot's policy to robots."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from interlace.cli.eval import checkpoint_of, refuse_checkpoint_of_model
from interlace.core.errors import UserError
from interlace.observe.run_folder import ROOT, find_run

if TYPE_CHECKING:
    from interlace.run.recipe.config import Recipe
    from interlace.run.serve import Serving

NEVER_S = 1e12
"""Hang limit of a server, in seconds, effectively infinite: a server without clients does not hang."""


def make_served_policy(
    run_or_policy: str, overrides: Sequence[str], checkpoint: str | int = "newest"
) -> "Recipe | Path":
    """Returns the settings of a run or a recipe, with the model to serve, or the folder of a published policy.

    checkpoint: of a run, as for make_served_recipe(). Raises UserError for an unknown policy or checkpoint.
    """
    from interlace.robots.serving.published import is_published_policy
    from interlace.run.recipe.load import load_recipe, recipe_names

    run = find_run(run_or_policy)
    refuse_checkpoint_of_model(run_or_policy, run, checkpoint)
    if run is None and is_published_policy(Path(run_or_policy)):
        if overrides:
            raise UserError(f"{overrides[0]} is a setting of a recipe, and {run_or_policy!r} is a policy's folder.")
        return Path(run_or_policy)
    if run is None and run_or_policy not in recipe_names() and not run_or_policy.endswith((".yaml", ".yml")):
        raise UserError(
            f"{run_or_policy!r} is neither a run in {ROOT}/, nor the folder of a published policy, "
            "nor a recipe. `interlace recipes` lists the recipes."
        )
    settings = load_recipe(str(run.config) if run else run_or_policy, overrides)
    model = checkpoint_of(run, settings, settings.best, checkpoint) if run else settings.model
    cluster = settings.cluster.model_copy(update={"hang_after_s": NEVER_S})
    return settings.model_copy(update={"model": model, "cluster": cluster})


def announce_policy(serving: "Serving") -> None:
    """Prints the address and the key of a policy server."""
    console = Console()
    console.print(f"serving the policy on {serving.url}", highlight=False, soft_wrap=True)
    console.print(f"key: {serving.api_key}", highlight=False, soft_wrap=True)
