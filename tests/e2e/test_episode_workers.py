"""Training works with episodes in worker processes, and without worker processes."""

from pathlib import Path

import pytest

from interlace.observe.stop import StopSignal
from interlace.run.equivalence import certify, toy, variants
from interlace.run.recipe.load import load_recipe
from tests.support.training import SMALL

EPISODE = "episode.name=tests.support.worker_episodes:ThreeTurns"


@pytest.mark.slow  # three runs, two with processes of their own
def test_samples_and_weights_are_the_same_to_the_bit_for_any_number_of_workers_and_any_placement(
    tmp_path: Path,
) -> None:
    settings = [*SMALL, f"model.cache_dir={tmp_path / 'cache'}", EPISODE]
    here, there = (toy(load_recipe("quickstart", [*settings, f"episode.workers={count}"])) for count in (0, 2))
    recipes = {"none": here, "two": there, "two, disaggregated": variants(there)["disaggregated"]}
    for trial in certify(recipes, tmp_path / "runs", StopSignal(lambda: None)):
        assert trial.same_samples and trial.difference == 0 and trial.moved > 1e-5, trial.schedule
