"""`interlace.dry_run`: sizes and memory of a run that is not started."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Unpack

from interlace.api.advice import for_python
from interlace.api.given_run import GivenRun
from interlace.api.names import check_given
from interlace.cli.preflight import disable_progress_bars
from interlace.run.library import ProgramInputs, Reward, Settings, trains_on_rows
from interlace.run.program_rows import ColumnMap, rows_by_place
from interlace.run.recipe.config import Recipe

if TYPE_CHECKING:
    from interlace.forecast.dry_run import DryRun


@for_python
def dry_run(  # house: the inputs of train()
    recipe: str | Path | Recipe | None = None,
    /,
    *,
    model: object = None,
    tokenizer: object = None,
    data: object = None,
    reward: Reward | None = None,
    columns: ColumnMap | None = None,
    heldout_size: int | None = None,
    overrides: Sequence[str] = (),
    devices: str | None = None,
    **settings: Unpack[Settings],
) -> "DryRun":
    """Checks a run as train() does and forecasts its sizes and memory, as `train --dry-run`. Writes nothing.

    It has the inputs of train(). devices: GPUs that this machine need not have, such as "1x24GB" or "8xH100-80GB"; None
    takes the devices of the run's cluster. Raises UserError for a run that cannot start.
    """
    disable_progress_bars()
    check_given(recipe)
    inputs = ProgramInputs(
        model=model, tokenizer=tokenizer, data=data, reward=reward, columns=columns, heldout_size=heldout_size
    )
    with TemporaryDirectory(prefix="interlace-") as folder:
        has_completions = trains_on_rows(recipe, settings, overrides)
        sections = inputs.sections(Path(folder), settings, has_completions=has_completions)
        given = GivenRun(recipe=recipe, overrides=tuple(overrides), sections=sections)
        found = given.settings()
        given.check(found, has_callbacks=False)
        from interlace.forecast.dry_run import make_dry_run

        with rows_by_place(sections.rows):
            return make_dry_run(found, None if devices is None else str(devices))
