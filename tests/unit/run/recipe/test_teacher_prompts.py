"""The context of a teacher is checked on every row."""

from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.models.loading import load_tokenizer
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import recipe_prompts
from interlace.run.recipe.teacher_prompts import check_context


def test_a_later_row_without_the_column_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1", "answer": "2", "hint": "3"}\n{"prompt": "4", "answer": "5"}\n')
    changes = [f"task={path}", "reference.model=null", "reference.context='{hint}'"]
    recipe = load_recipe("distill", changes)
    with pytest.raises(UserError, match="has no column"):
        check_context(recipe, recipe_prompts(recipe).train, load_tokenizer(recipe.model))
