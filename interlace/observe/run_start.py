"""Start of a run, for all commands: the choice between a new and an existing run, and how to continue one."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from interlace.core.errors import DiskFullError, InterlaceError, UserError, is_full_disk

if TYPE_CHECKING:
    from interlace.observe.run_folder import RunFolder


def check_choice(*, resume: bool, overwrite: bool) -> None:
    """Raises UserError if a run is to be continued and deleted."""
    if resume and overwrite:
        raise UserError("--resume continues a run, --overwrite deletes it: give one of them.")


def how_to_continue(folder: "RunFolder") -> str:
    """Returns the command that resumes the run, or a sentence if there is no checkpoint."""
    from interlace.observe.checkpoints import Checkpoints  # loads numpy, and each command imports this module

    if not Checkpoints(folder.checkpoints, keep=1).steps():
        return "There is no checkpoint to continue from: start it again with --overwrite."
    return f"To continue from its newest checkpoint: interlace train {folder.config} --name {folder.name} --resume"


@contextmanager
def explain_end(folder: "RunFolder", how_to_continue: Callable[["RunFolder"], str], *, resume: bool) -> Iterator[None]:
    """Adds to the error that ends a run inside how the run is continued. resume: whether it was continued itself.

    how_to_continue: returns the advice. Raises DiskFullError for a full disk, and InterlaceError after
    a second Ctrl-C. Removes the folder of a new run that a UserError ends before anything was trained.
    """

    earlier = f"The earlier run {folder.name!r} stays as it was."

    def advise() -> str:
        is_returned = not resume and folder.replaced.exists() and not folder.has_trained
        return f"{earlier} The files of this one are in {folder.failed}." if is_returned else how_to_continue(folder)

    try:
        yield
    except KeyboardInterrupt:
        raise InterlaceError(f"stopped at once. {advise()}") from None
    except Exception as error:
        if isinstance(error, OSError) and is_full_disk(error):
            full = f"the disk of {folder.path} is full, so the run could not write on. Make room first."
            raise DiskFullError(f"{full} {advise()}") from error
        if isinstance(error, UserError) and not resume and not folder.has_trained:
            if folder.replaced.exists():
                error.add_note(earlier)
            shutil.rmtree(folder.path)  # only the workers could detect this mistake
        elif not (isinstance(error, UserError) and resume) or is_full_disk(error):
            # Settings that a resumed run refuses would be refused again, so the same call is not suggested.
            error.add_note(advise())
        raise
