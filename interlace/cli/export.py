"""`interlace export`: the model of a run as a folder, on the hub, or as a GGUF file."""

from typing import Annotated

import typer

from interlace.cli.preflight import disable_progress_bars
from interlace.observe.run_folder import run_folder


def export(
    run: Annotated[str, typer.Argument(help="Name or folder of a run.")],
    to: Annotated[str, typer.Option(help="A folder, hub:OWNER/NAME, or a file that ends with .gguf.")],
    merge: Annotated[
        bool, typer.Option("--merge/--adapter", help="Of a run with an adapter: the merged model, or the adapter.")
    ] = True,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    checkpoint: Annotated[str, typer.Option(help="newest, best (by the run's `best`), or a step.")] = "newest",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    public: Annotated[bool, typer.Option("--public", help="A new repository of the hub is public.")] = False,
) -> None:
    """Write the trained model with a model card for transformers, peft, the Hugging Face hub or llama.cpp."""
    from interlace.run.recipe.load import load_recipe

    disable_progress_bars()
    folder = run_folder(run)
    recipe = load_recipe(str(folder.config))
    from interlace.run.export import ExportOptions, export_run  # loads torch

    options = ExportOptions(
        to=to, merge=merge, dtype=dtype, checkpoint=checkpoint, overwrite=overwrite, private=not public
    )
    print(export_run(folder, recipe, options))
