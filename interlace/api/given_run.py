"""A run as a program gives it: a recipe, objects, and changes of settings."""

from dataclasses import dataclass
from pathlib import Path

from interlace.core.errors import UserError
from interlace.run.library import Sections, list_required_numbers
from interlace.run.recipe.check_settings import check_new_run
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe, override_key


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenRun:
    """A recipe, and the sections and overrides that change it."""

    recipe: str | Path | Recipe | None
    overrides: tuple[str, ...]
    sections: Sections

    def settings(self) -> Recipe:
        """Returns the recipe. Raises UserError."""
        if isinstance(self.recipe, Recipe):
            if self.overrides:
                raise UserError("overrides are for a recipe by name or path: change the Recipe, or give settings.")
            return self.sections.recipe(self.recipe)
        if self.recipe is not None:
            changed = [override_key(override) for override in self.overrides]
            numbers = list_required_numbers(self.sections.values)
            return self.sections.recipe(load_recipe(str(self.recipe), (*numbers, *self.overrides)), changed)
        if self.overrides:
            raise UserError("overrides are for a recipe by name or path: without one, give settings, such as steps=10.")
        if missing := [
            name for name in ("model", "data") if {"data": "task"}.get(name, name) not in self.sections.values
        ]:
            raise UserError(
                f"train() without a recipe needs model and data, and has no {' and no '.join(missing)}. Give them, or "
                'a recipe: interlace.train("quickstart").'
            )
        return self.sections.recipe()

    def check(self, recipe: Recipe, *, has_callbacks: bool) -> None:
        """Raises UserError for a mistake in the recipe that settings() returned; see check_new_run()."""
        spec = str(self.recipe) if isinstance(self.recipe, str | Path) else None
        check_new_run(recipe, spec, has_callbacks=has_callbacks)
