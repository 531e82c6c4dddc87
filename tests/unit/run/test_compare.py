"""A comparison of schedules ends at a stop."""

from pathlib import Path

import pytest

from interlace.core.errors import StoppedError
from interlace.observe.progress import QuietProgress
from interlace.observe.stop import StopSignal
from interlace.run.outcome import run_variants
from interlace.run.recipe.load import load_recipe


def test_a_stop_before_the_first_step_starts_no_further_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as a failure of the schedule, after which the others started."""
    stop = StopSignal(lambda: None)

    def train(*_args: object, **_options: object) -> None:
        stop._requested = True
        raise StoppedError("stopped before there was anything to save.")

    monkeypatch.setattr("interlace.run.train.train", train)  # a real step would have to last longer than the patience
    recipe = load_recipe("quickstart")
    with pytest.raises(StoppedError, match="nothing to compare"):
        run_variants({"one": recipe, "two": recipe}, tmp_path, "run", progress=QuietProgress(), stop=stop)
    assert len(list(tmp_path.iterdir())) == 1
