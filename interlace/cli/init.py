"""`interlace init`: writes a small project that trains as it is."""

import json
import re
from importlib.resources import files
from itertools import permutations
from pathlib import Path
from typing import Annotated

import typer

from interlace.core.errors import UserError
from interlace.core.random import keyed_random

TEMPLATES = ("recipe.yaml", "my_reward.py", "README.md")


def init(
    name: Annotated[str, typer.Argument(help="Folder to create; letters, digits, '.', '-' and '_'.")],
) -> None:
    """Write a new project: a recipe, a reward function, data and a README. It trains as it is."""
    folder = write_project(Path(name))
    print(
        f"{folder}: {', '.join(str(path.relative_to(folder)) for path in sorted(folder.rglob('*')) if path.is_file())}"
    )
    print(f"cd {folder} && interlace train recipe.yaml")


def write_project(folder: Path) -> Path:
    """Writes the files of a project and returns its folder. Raises UserError if the folder exists and is not empty."""
    from jinja2 import Environment, StrictUndefined

    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", folder.name):
        raise UserError(f"{folder.name!r} is no name of a project: use letters, digits, '.', '-' and '_'.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder. Choose another name, or remove it.")
    (folder / "data").mkdir(parents=True)
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    templates = files("interlace.cli") / "project"
    for name in TEMPLATES:
        text = (templates / f"{name}.template").read_text(encoding="utf-8")
        (folder / name).write_text(environment.from_string(text).render(name=folder.name), encoding="utf-8")
    lines = [json.dumps(row) + "\n" for row in _make_questions()]
    (folder / "data" / "questions.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _make_questions() -> list[dict[str, str]]:
    """Returns all 720 sequences of three different digits in a fixed random order, each with its largest digit."""
    digits = ["".join(each) for each in permutations("0123456789", 3)]
    keyed_random(0, "questions").shuffle(digits)
    return [{"prompt": f"largest of {text}: ", "answer": max(text)} for text in digits]
