"""`interlace record`: writes demonstrations of a recipe's simulators as a data set."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from interlace.cli.preflight import disable_progress_bars


def record(  # house: typer makes an option of each argument
    recipe: Annotated[str, typer.Argument(help="A shipped recipe (`interlace recipes`), or the path of a YAML file.")],
    folder: Annotated[Path, typer.Argument(help="New folder of the data set.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the recipe to change.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes for each instruction.")] = 20,
    noise: Annotated[
        list[float] | None, typer.Option(help="Standard deviation of the noise on each number of an action; repeat it.")
    ] = None,
    fps: Annotated[float, typer.Option(min=1e-3, help="Frames per second that the data set states.")] = 10.0,
    video: Annotated[
        bool, typer.Option("--video", help=r"Write pictures as videos (pip install 'interlace\[video]').")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier data set in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No result.")] = False,
) -> None:
    """Record a scripted expert in a recipe's simulators as a LeRobotDataset (v3)."""
    disable_progress_bars()
    from interlace.robots.experts import ExpertConfig
    from interlace.run import record as recording
    from interlace.run.recipe.check_settings import check_settings
    from interlace.run.recipe.load import load_recipe

    settings = load_recipe(recipe, overrides or [])
    check_settings(settings)
    experts = ExpertConfig.parse({"episodes": episodes, "noise": tuple(noise or ())}, where="record")
    found = recording.record(settings, folder, experts, fps=fps, video=video, overwrite=overwrite)
    Console(quiet=quiet).print(
        f"{found.num_episodes} episodes, {found.num_steps} steps, {found.num_successes} successes in {folder}"
    )
