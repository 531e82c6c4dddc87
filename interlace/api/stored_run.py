"""The files of a run, read when they are first used."""

from functools import cached_property
from pathlib import Path

from interlace.core.errors import UserError
from interlace.observe.best import read_best
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.run.best import NEWEST, choose_checkpoint
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe


class StoredRun:
    """Settings, logs and checkpoints in the folder of a run."""

    def __init__(self, folder: Path, chosen: str | int) -> None:
        """chosen: the checkpoint to use: `newest`, `best` or a step."""
        self.files = RunFolder(path=folder)
        self._checkpoints, self._chosen = Checkpoints(self.files.checkpoints, keep=1), chosen

    @cached_property
    def recipe(self) -> Recipe:
        """The settings of the run."""
        return load_recipe(str(self.files.config))

    @cached_property
    def data(self) -> RunData:
        """Metrics, evaluations and samples, read once."""
        return RunData.read(self.files)

    def find_checkpoint(self) -> Path | None:
        """Returns the chosen checkpoint. Returns None if the run has no checkpoint."""
        latest = self._checkpoints.latest()
        if self._chosen == NEWEST or latest is None:
            return latest
        return choose_checkpoint(self.files, self.recipe.best, self._chosen)

    def find_best_checkpoint(self) -> Path | None:
        """Returns the best checkpoint by the run's `best`. Returns None if the run has none."""
        steps = self._checkpoints.steps()
        best = read_best(self.recipe.best, self.files, steps).step if self.recipe.best and steps else None
        return None if best is None else self._checkpoints.path(best)

    def require_checkpoint(self) -> Path:
        """Returns the chosen checkpoint. Raises UserError if the run has no checkpoint."""
        path = self.find_checkpoint()
        if path is None:
            raise UserError(
                f"run {self.files.name!r} has no checkpoint yet; it writes one at its end, or every checkpoint_every "
                "steps."
            )
        return path

    def summarize(self) -> dict[str, object]:
        """Returns the run in a few values for display: steps, reward, held-out accuracy, checkpoint."""
        if not self.files.has_trained:
            return {"steps": "none yet"}
        rewards = self.data.values("reward/mean")
        found: dict[str, object] = {"steps": f"{len(self.data.rows)} of {self.recipe.steps}"}
        if rewards:
            found["reward"] = f"{rewards[0]:.3g} -> {rewards[-1]:.3g}"
        accuracies = self.data.values("eval/accuracy_greedy")
        if accuracies:
            found["held-out accuracy"] = " -> ".join(f"{each:.3f}" for each in (accuracies[0], accuracies[-1]))
        checkpoint = self.find_checkpoint()
        return {**found, "checkpoint": checkpoint.name if checkpoint else "none"}
