"""A sweep from a program."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from interlace.api.advice import for_python, in_any_loop
from interlace.api.run import TrainedRun, check_folder, list_overrides, recipe_name
from interlace.cli.sweep import SweepOptions, run_sweep
from interlace.core.errors import UserError
from interlace.core.types import JSON
from interlace.core.yaml_text import parse_yaml, to_json_text
from interlace.observe.notebook import shorten_value, table_html
from interlace.run.sweep import SweepResult

_PLAIN = re.compile(r"[\w.:/+-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTable:
    """Outcomes of a recipe with several values of some settings."""

    result: SweepResult

    @property
    def rows(self) -> list[dict[str, JSON]]:
        """Returns a mapping for each run, the best first: the swept settings, steps, metric, best, seconds, folder.

        A setting that is a list or a mapping is its text.
        """
        return [
            {
                **{key: _read_value(text) for key, text in row.values.items()},
                "steps": row.steps, self.result.metric: row.metric, "best": row.best,
                "seconds": row.seconds, "folder": str(self.result.folder / row.name),
            }
            for row in self.result.rows
        ]  # fmt: skip

    @property
    def failed(self) -> Mapping[str, str]:
        """Returns the runs that ended with an error, and the error."""
        return self.result.failed

    @property
    def report(self) -> Path | None:
        """Returns the report of all runs on one page; None if no run trained."""
        return self.result.report

    def __repr__(self) -> str:
        lines = [
            ", ".join(f"{name} {shorten_value(value)}" for name, value in row.items() if name != "folder")
            for row in self.rows
        ]
        return "\n".join([f"{type(self).__name__} by {self.result.metric}", *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        return table_html(self.rows)


@for_python
@in_any_loop
def sweep(  # house: the options of the command
    recipe: str | Path | TrainedRun,
    settings: Mapping[str, Sequence[JSON]],
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    folder: str | Path = "runs",
    resume: bool = False,
    metric: str | None = None,
    parallel: int = 1,
    quiet: bool = False,
) -> SweepTable:
    """Trains a recipe with every combination of the settings' values. The command has the same options.

    settings: key -> values, such as {"optimizer.lr": [1e-4, 3e-4], "seed": [0, 1, 2]}. overrides: changes of all runs.
    parallel: runs at a time, each a process with its share of the cores and GPUs. Raises UserError for values that are
    no list.
    """
    _check_settings(settings)
    swept = [f"{key}={','.join(_format_value(value) for value in values)}" for key, values in settings.items()]
    options = SweepOptions(name, resume, metric, parallel)
    console, root = Console(quiet=quiet), check_folder(folder).absolute()
    changes = [*list_overrides(overrides), *swept]
    return SweepTable(result=run_sweep(recipe_name(recipe), changes, root, options, console, quiet=quiet))


def _check_settings(settings: Mapping[str, Sequence[JSON]]) -> None:
    if not isinstance(settings, Mapping):
        raise UserError(
            f"settings is a {type(settings).__name__}. Give a mapping of each key to its values, such as "
            '{"optimizer.lr": [1e-4, 3e-4]}.'
        )
    for key, values in settings.items():
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            raise UserError(
                f"settings[{key!r}] is {values!r}. Give a list of values, {{{key!r}: [{values!r}]}}; a setting "
                "that all runs share belongs to overrides."
            )


def _format_value(value: object) -> str:
    """Returns a value as on the command line; a text with commas, spaces or brackets in quotes.

    Numbers of numpy and paths are written as numbers and texts. Raises UserError for a value that is no setting.
    """
    plain = getattr(value, "tolist", lambda: str(value) if isinstance(value, Path) else value)()
    try:
        return plain if isinstance(plain, str) and _PLAIN.fullmatch(plain) else to_json_text(plain)
    except TypeError:
        raise UserError(
            f"{value!r} is a {type(value).__name__}, and a value of a sweep is text, a number, true, false, null, or a "
            "list or mapping of these. A class or function is named as package.module:Name."
        ) from None


def _read_value(text: str) -> JSON:
    """Returns a swept value as the recipe reads it: a number, a truth value, None or text."""
    value: JSON = parse_yaml(text)
    return value if value is None or isinstance(value, bool | int | float | str) else text  # YAML has dates, too
