"""Rows of a source that is a table: a file, a saved folder, or a data set of the hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from interlace.core.errors import UserError
from interlace.core.hub import find_hub_fault
from interlace.data.columns import to_row
from interlace.data.config import ColumnMap, FileSource, HubSource
from interlace.data.rows import Row, Split
from interlace.data.tables import Numbered, import_datasets, read_table

NO_COLUMNS: Mapping[str, str | None] = {}


def table_rows(
    source: FileSource | HubSource,
    split: Split,
    columns: ColumnMap = NO_COLUMNS,
    omit: Sequence[str] = (),
    *,
    has_completions: bool = False,
) -> list[Row]:
    """Reads all rows of a split, in order. Raises UserError with file and line, or with data set and row.

    columns, omit, has_completions: see to_row().
    """
    if isinstance(source, HubSource):
        name, place, rows = source.name, f"{source.name} {split}", read_hub(source, split)
    else:
        spec = source.train if split == "train" else source.heldout
        if spec is None:
            return []
        path = Path(spec).expanduser()
        name, place, rows = path.name, str(path), read_table(spec)
    return [
        to_row(
            values, columns, omit, uid=f"{split}/{name}:{number}", origin=f"{place}:{number}",
            has_completions=has_completions,
        )
        for number, values in rows
    ]  # fmt: skip


def read_hub(source: HubSource, split: Split) -> Numbered:
    """Reads the rows of a split, up to the source's limit. A held-out split that the source does not name has none.

    Raises UserError if the hub cannot be reached, or has no such data set, config or split.
    """
    name = source.split if split == "train" else source.heldout
    if name is None:
        return
    library = import_datasets(f"the data set {source.name!r} of the hub")
    _check_reach(source.name)
    chosen = {"split": name, "revision": source.revision, "streaming": source.streaming}
    built = library.exceptions.DatasetsError
    try:
        dataset = library.load_dataset(source.name, source.config, **chosen)
        for number, values in enumerate(dataset, start=1):  # a stream meets a damaged file here
            if source.limit is not None and number > source.limit:
                return
            yield number, values
    except (OSError, ValueError, RuntimeError, built) as error:  # each kind of mistake has its class, all below these
        reason = error.__cause__ if isinstance(error, built) and error.__cause__ else error
        raise UserError(
            f"task.hub.name = {source.name!r} with config {source.config!r} and split {name!r} cannot be loaded: "
            f"{' '.join(str(reason).split())}"
        ) from None


def _check_reach(name: str) -> None:
    """Raises UserError for a hub that does not answer: its client would retry for minutes."""
    from huggingface_hub import constants

    if error := find_hub_fault():
        raise UserError(
            f"data set {name!r}: {constants.ENDPOINT} cannot be reached ({error}). Give a file or a saved folder as "
            "task=PATH; a data set that was fetched before is read with HF_HUB_OFFLINE=1 in the environment."
        )
