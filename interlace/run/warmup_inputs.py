"""Inputs of a warm-up outside its recipe: local files, with a text that changes with their content, and packages."""

import contextlib
import hashlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from interlace.core.plugins import load_object
from interlace.core.version import find_versions
from interlace.robots.env_stage import simulators_of
from interlace.run.recipe.config import Recipe

MAX_HASHED_BYTES = 64 << 20
"""Size up to which a file is identified by its content, which takes below 0.1 s. A larger file, such as the weights of
a model, is identified by its size and modification time, so that a run does not read it once more at its start."""


def list_warmup_inputs(recipe: Recipe) -> list[Path]:
    """Returns the existing files and folders of a recipe's warm-up: model, tokenizer, rows, and the user's classes."""
    task = recipe.task
    files = [part.files for part in (task, *task.mixture, *task.heldout_sets.values()) if part.files is not None]
    rows = [path for source in files for path in (source.train, source.heldout)]
    paths = [Path(path).expanduser() for path in (recipe.model.path, recipe.model.tokenizer, *rows) if path is not None]
    return [path for path in (*paths, *_list_own_modules(recipe)) if path.exists()]


def _list_own_modules(recipe: Recipe) -> Iterator[Path]:
    """Yields the files of the user's classes that write the examples, and the prompts that these answer.

    A simulator records the examples of its scripted expert.
    """
    style = recipe.warmup.demonstrations.style if recipe.warmup else ""
    simulators = simulators_of(recipe.episode)
    for name in (style, recipe.episode.name, simulators.family if simulators else ""):
        if ":" in name:
            with contextlib.suppress(OSError, TypeError):  # an object of a notebook, or no class
                yield Path(inspect.getfile(cast(type, load_object("class", name))))


def list_package_versions(recipe: Recipe) -> dict[str, str]:
    """Returns the versions of the packages that train the model, generate its questions or record its examples."""
    task, packages = recipe.task, ["torch", "transformers"]
    if any(part.reasoning_gym for part in (task, *task.mixture, *task.heldout_sets.values())):
        packages.append("reasoning_gym")
    if simulators_of(recipe.episode):
        packages += ["gymnasium", "mujoco", "metaworld"]
    return find_versions(packages)


def describe_content(path: Path) -> str:
    """Returns a text that changes with the content of a file, or of the files in a folder without its subfolders.

    It contains no path, so that a copy of the files has the same text, except for files above MAX_HASHED_BYTES.
    """
    if path.is_file():
        return _describe_file(path)
    return "\n".join(f"{file.name} {_describe_file(file)}" for file in sorted(path.iterdir()) if file.is_file())


def _describe_file(file: Path) -> str:
    found = file.stat()
    if found.st_size > MAX_HASHED_BYTES:
        return f"{found.st_size} bytes at {found.st_mtime_ns}"
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()
