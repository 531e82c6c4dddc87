"""Start of a run, for all commands: the choice between a new and an existing run, and how to continue one."""

from typing import TYPE_CHECKING

from interlace.core.errors import UserError

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
