"""Changes of a run's recipe since its start."""

from pathlib import Path

from interlace.observe.run_folder import RunFolder
from interlace.run.library import ProgramInputs
from interlace.run.recipe.load import GivenRecipe, list_edits

ROWS = [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(4)]


def test_a_recipe_with_rows_of_a_program_is_unchanged_after_the_runs_were_moved(tmp_path: Path) -> None:
    """The config.yaml of a run as the recipe of another one: its rows are at the new place, and are the same rows."""
    given = ProgramInputs(model="tiny:micro", data=ROWS, reward="exact")
    recipe = given.sections(tmp_path / "old", {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 1}).recipe()
    first, second = (RunFolder.create(tmp_path / "old", name) for name in ("first", "second"))
    for folder in (first, second):
        folder.write_config(recipe)
    GivenRecipe.read(first.config).write(second, resume=False)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = GivenRecipe.read(tmp_path / "new" / "first" / "config.yaml")
    assert list_edits(moved, RunFolder(path=tmp_path / "new" / "second")) == []
