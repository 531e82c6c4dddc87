"""`interlace recipes`: what can be trained as it is."""

from rich.console import Console

from interlace.cli.listing import listing


def recipes() -> None:
    """List the shipped recipes. Your own is a YAML file: `interlace train path/to/recipe.yaml`."""
    from interlace.recipes.load import recipe_names, recipe_path

    Console().print(listing([recipe_path(name) for name in recipe_names()]))
