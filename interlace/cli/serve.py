"""`interlace serve`: serves a model or a run's checkpoint through an OpenAI-compatible API, or a policy to robots."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from interlace.cli.eval import checkpoint_of, refuse_checkpoint_of_model
from interlace.cli.preflight import disable_progress_bars, say
from interlace.core.errors import UserError
from interlace.core.yaml_text import to_json_text
from interlace.observe.run_folder import ROOT, find_run
from interlace.observe.stop import raise_on_stop_signals

if TYPE_CHECKING:
    from interlace.models.config import ModelConfig
    from interlace.run.recipe.config import Recipe
    from interlace.run.serve import Serving

MAX_PORT = 65535
NEVER_S = 1e12
"""Hang limit of a server, in seconds, effectively infinite: a server without clients does not hang."""


def serve(
    model_or_run: Annotated[str, typer.Argument(help="Any model, a checkpoint, or a run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings: rollout, sampling, renderer."),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: newest, best (by its `best`), a step, or a folder with another model.")
    ] = "newest",
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key of clients. Default: one is drawn and printed.", envvar="INTERLACE_API_KEY"),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(help="Key of the control verbs. Default: one is drawn.", envvar="INTERLACE_ADMIN_KEY"),
    ] = None,
    policy: Annotated[
        bool, typer.Option("--policy", help="Serve a robot's policy over WebSocket; settings: policy.KEY=VALUE.")
    ] = False,
) -> None:
    """Serve a model over HTTP (chat completions, completions, responses, messages, token ids), or a robot's policy."""
    disable_progress_bars()
    check_access(port, api_key, admin_key)
    if policy:
        from interlace.run.serve_policy import PolicyOptions, serve_policy, split_policy_settings

        settings, others = split_policy_settings(overrides or [])
        source = make_served_policy(model_or_run, others, checkpoint)
        run = find_run(model_or_run)
        made = PolicyOptions(host=host, port=port, api_key=api_key, settings=settings, run=run)
        _run_until_stopped(partial(serve_policy, source, made, on_ready=_announce_policy))
        return
    recipe = make_served_recipe(model_or_run, overrides or [], checkpoint)
    from interlace.run.serve import ServeOptions  # loads torch, so a bad recipe is refused before it
    from interlace.run.serve import serve as serve_model

    options = ServeOptions(host=host, port=port, api_key=api_key, admin_key=admin_key)
    _run_until_stopped(partial(serve_model, recipe, options, on_ready=_announce_address))


def _run_until_stopped(run_server: Callable[..., None]) -> None:
    """Runs a server until SIGINT or SIGTERM. run_server: takes the event `stop`."""
    raise_on_stop_signals()
    try:
        run_server(stop=asyncio.Event())
    except KeyboardInterrupt:
        Console().print("stopped")


def check_access(port: int, api_key: str | None, admin_key: str | None) -> None:
    """Raises UserError for a port that cannot exist, and if clients would have the key of the control verbs."""
    if not 0 <= port <= MAX_PORT:
        raise UserError(f"--port {port}: a port is a number from 0 to {MAX_PORT}; 0 takes a free one.")
    if api_key is not None and api_key == admin_key:
        raise UserError("--api-key and --admin-key are the same: clients could pause the server. Give two keys.")


def _announce_address(serving: "Serving") -> None:
    say(Console(), f"serving on {serving.url}")
    say(Console(), f"export OPENAI_BASE_URL={serving.url}/v1")
    say(Console(), f"export OPENAI_API_KEY={serving.api_key}")
    say(Console(), f"control key: {serving.admin_key}")


def _announce_policy(serving: "Serving") -> None:
    say(Console(), f"serving the policy on {serving.url}")
    say(Console(), f"key: {serving.api_key}")


def make_served_recipe(model_or_run: str, overrides: Sequence[str], checkpoint: str | int = "newest") -> "Recipe":
    """Returns the settings of the run; for a model, settings of which only the model and the engine matter.

    checkpoint: of a run, `newest`, `best`, a step or a folder. Raises UserError if there is no such checkpoint.
    """
    from interlace.run.recipe.load import load_recipe

    run = find_run(model_or_run)
    refuse_checkpoint_of_model(model_or_run, run, checkpoint)
    if run:
        settings = load_recipe(str(run.config), overrides)
        model = checkpoint_of(run, settings, settings.best, checkpoint)
    else:
        # The quick start serves only as a complete recipe: serving uses no task and no algorithm.
        whole = (
            "warmup=null",
            "reward=exact",
            "sampling.max_new_tokens=1024",
            "rollout=native",
            # In quotes, because the text of an override is YAML, in which ` #` begins a comment.
            f"model={to_json_text(model_or_run)}",
        )
        settings = load_recipe("quickstart", [*whole, *overrides])
        model = settings.model
    return _with_model(settings, model)


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
    return _with_model(settings, model)


def _with_model(settings: "Recipe", model: "ModelConfig") -> "Recipe":
    """Returns the settings with the model to serve, and without a limit of the time without progress."""
    cluster = settings.cluster.model_copy(update={"hang_after_s": NEVER_S})
    return settings.model_copy(update={"model": model, "cluster": cluster})
