"""Prompts of a recipe in the form that its episodes need."""

from pathlib import Path

from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import recipe_prompts, with_instructions


def test_an_instruction_is_read_by_the_template_of_its_source(tmp_path: Path) -> None:
    starts = "starts: {train_size: 2, heldout_size: 0, tasks: [0], instructions: [push]}"
    sources = f'{{name: own, {starts}, format: {{template: "In: {{prompt}}?"}}}}, {{name: tasks, {starts}}}'
    recipe = load_recipe(
        "robot-cartpole",
        [f"task={{mixture: [{sources}], format: {{template: 'Do: {{prompt}}'}}}}", f"model.cache_dir={tmp_path}"],
    )
    prompts = recipe_prompts(recipe).train
    assert {prompt.text for prompt in prompts} == {"In: push?", "Do: push"}
    assert {prompt.text for prompt in with_instructions(recipe, prompts)} == {"push"}
