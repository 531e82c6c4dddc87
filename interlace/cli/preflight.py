"""Preparations and output of a command: checks its output file, silences libraries, prints lines, completes values."""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import typer
from pydantic import BaseModel, TypeAdapter, ValidationError

from interlace.core.errors import UserError
from interlace.core.processes import read_stat
from interlace.observe.run_folder import ROOT

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from interlace.observe.stop import StopSignal


_started_s: list[float] = []
"""Start of the process, if the process is a command."""


def note_start() -> None:
    """Records that this process is a command, whose start counts in limits of its time."""
    age_s = time.process_time()
    with contextlib.suppress(OSError):  # other systems than Linux have no such file
        started_s = int(read_stat("self")[19]) / os.sysconf("SC_CLK_TCK")
        age_s = max(age_s, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    _started_s[:] = [time.monotonic() - age_s]


def started_s() -> float:
    """Returns the time.monotonic() value at which this process started if it is a command, else the present one."""
    return _started_s[0] if _started_s else time.monotonic()


def disable_progress_bars() -> None:
    """Turns off the progress bars of transformers, which would break the lines of the live view.

    Sets an environment variable, which the library reads when a command imports it. A program may have imported it.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if transformers := sys.modules.get("transformers"):
        transformers.utils.logging.disable_progress_bar()


def say(console: "Console", text: str) -> None:
    """Prints text as it is, without markup, colours or line breaks of the console."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def writable(path: Path, option: str) -> Path:
    """Returns the path. Raises UserError if no file can be written there. option: name of the option, for messages."""
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}. Make it, or choose another file.")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder. Name a file, such as one in it.")
    beside = path.with_name(f"{path.name}.tmp")  # write_atomic() writes such a file first
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}. Choose another file.") from None
    return path


@contextlib.contextmanager
def keep_after_error(prefix: str, stop: "StopSignal") -> Iterator[Path]:
    """Makes a temporary folder. It is kept after an error, whose message may name its files, but not after a stop."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except BaseException:
        if stop.requested:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


RECIPE_HELP = "A shipped recipe (`interlace recipes`) or the path of a YAML file."
FLAT = {"AlgorithmChoice": ("name", "settings"), "ScheduleChoice": ("preset", "resolved")}
"""Class of a section -> its own setting, and the field whose settings a recipe writes in the section itself."""
RUNS_HELP = "Names or folders of runs; several are compared."
STEP_HELP = "Step whose operations are drawn by device, and whose samples have lanes. Default: the middle one."


def complete_recipe(incomplete: str) -> list[str]:
    """Returns the shipped recipes and the YAML files that begin with a text."""
    from interlace.run.recipe.load import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)] + _list_paths(incomplete, ".yaml")


def complete_run(incomplete: str) -> list[str]:
    """Returns the runs of this folder that begin with a text."""
    names = (
        [path.name for path in sorted(ROOT.iterdir()) if path.is_dir() and path.name[0] != "."] if ROOT.is_dir() else []
    )
    return [name for name in names if name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """Returns the settings that begin with a text, also within a section; after `KEY=`, the known values of the key."""
    from interlace.run.recipe.config import Recipe

    key, equals, value = incomplete.partition("=")
    section, dot, start = key.rpartition(".")
    kinds = _list_settings(Recipe)
    for name in section.split(".") if section else ():
        kinds = _list_settings(kinds.get(name))
    if equals:
        return [f"{key}={word}" for word in _list_words(key, kinds.get(start)) if word.startswith(value)]
    found = []
    for name in [name for name in kinds if name.startswith(start)]:
        is_section = bool(_list_sections(kinds[name]))
        found += [f"{section}{dot}{name}."] if is_section else []
        found += [f"{section}{dot}{name}="] if not is_section or _takes_word(kinds[name]) else []
    return found


def _list_words(key: str, kind: Any) -> list[str]:
    """Returns the known values of a key: names of presets or algorithms, or the words of its type."""
    if key == "schedule":
        from interlace.schedule.presets import preset_names

        return preset_names()
    if key == "algorithm":
        from interlace.algorithms import algorithm_names

        return list(algorithm_names())
    if get_origin(kind) is Literal:
        return [str(word) for word in get_args(kind)]
    return [word for part in get_args(kind) if not isinstance(part, str) for word in _list_words("", part)]


def _takes_word(kind: Any) -> bool:
    """Returns whether a section may be written as one word, such as `model=PATH`."""
    try:
        TypeAdapter(kind).validate_python("a word")
    except ValidationError as error:
        return any(problem["type"] != "model_type" for problem in error.errors())
    except UserError:
        return True  # the section rejects this word, not each word
    return True


def _list_settings(kind: Any) -> dict[str, Any]:
    """Returns the types of the settings of a section, by name, as a recipe has them; empty for a plain value."""
    found: dict[str, Any] = {}
    for config in _list_sections(kind):
        kinds = {
            name: Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            for name, field in config.model_fields.items()
        }
        if config.__name__ in FLAT:
            own, inner = FLAT[config.__name__]
            kinds = {own: kinds[own]} | _list_settings(kinds[inner])
        found |= kinds
    return found


def _list_sections(kind: Any) -> "list[type[BaseModel]]":
    """Returns the classes of settings that a type of a setting may contain; empty for a plain value."""
    open_types, found = [kind], []
    while open_types:
        kind = open_types.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found.append(kind)
        elif get_origin(kind) in (Union, UnionType, Annotated):
            open_types += get_args(kind)
    return found


def _list_paths(incomplete: str, suffix: str) -> list[str]:
    start = Path(incomplete)
    folder = start if incomplete.endswith("/") else start.parent
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.iterdir() if path.suffix == suffix)
    return [str(path) for path in found if str(path).startswith(incomplete)]


RecipeArgument: TypeAlias = Annotated[str, typer.Argument(help=RECIPE_HELP, autocompletion=complete_recipe)]
"""Argument of a command that takes a recipe."""


def settings_argument(text: str) -> Any:
    """Returns the argument of a command that takes KEY=VALUE. text: its help."""
    return typer.Argument(metavar="[KEY=VALUE]...", autocompletion=complete_setting, help=text)
