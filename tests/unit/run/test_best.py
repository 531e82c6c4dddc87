"""A checkpoint that is evaluated, served or exported belongs to its run."""

from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import RunIdentity, create_run_id
from interlace.run.best import choose_checkpoint


@pytest.mark.parametrize("choice", ["newest", 6])
def test_a_checkpoint_of_another_run_or_step_is_not_chosen(tmp_path: Path, choice: str | int) -> None:
    folder = RunFolder(path=tmp_path)
    own = RunIdentity(run=create_run_id(tmp_path), model="tiny:micro")
    written = Checkpoints(folder.checkpoints, keep=9, run=own).save(4, lambda path: (path / "w").touch(), num_bytes=1)
    assert choose_checkpoint(folder, None, "newest") == written
    moved = written.rename(written.with_name("step_6"))
    with pytest.raises(UserError, match="was written at step 4 and renamed"):
        choose_checkpoint(folder, None, choice)
    moved.rename(written)
    foreign = RunIdentity(run="b" * 32, model="tiny:micro")
    Checkpoints(folder.checkpoints, keep=9, run=foreign).save(6, lambda path: (path / "w").touch(), num_bytes=1)
    with pytest.raises(UserError, match="belongs to another run"):
        choose_checkpoint(folder, None, choice)
