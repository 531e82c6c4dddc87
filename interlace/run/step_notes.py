"""Notes to the user about a step, each kind once: failures, lost minibatches, idle weights."""

from interlace.core.errors import InterlaceError
from interlace.core.types import TerminalEvent
from interlace.flows.steps import StepResult
from interlace.observe.progress import ProgressView
from interlace.observe.run_folder import RunFolder
from interlace.observe.step_line import brief
from interlace.rewards.results import ACCURACY
from interlace.rewards.shaping import TASK
from interlace.run.failed_updates import IN_A_ROW
from interlace.run.recipe.config import Recipe

VERDICT_STEPS = 5
"""Steps with rewards after which a reward that no answer has reached is reported."""


class StepNotes:
    """Notes of one process of a run."""

    def __init__(self, recipe: Recipe, folder: RunFolder, progress: ProgressView) -> None:
        self._recipe, self._folder, self._progress = recipe, folder, progress
        self._told: set[str] = set()
        self._has_scored = False
        """True if this process has scored a sample."""
        self._largest_reward, self._num_scored_steps = 0.0, 0

    def say(self, result: StepResult, *, is_unchanged: bool) -> None:
        """Reports new findings of a step. is_unchanged: the step published the same weights as before."""
        self._say_failures(result)
        self._has_scored = self._has_scored or any(entry.sample.reward is not None for entry in result.ended)
        self._say_lost_minibatches(result)
        self._say_idle_weights(result)
        self._say_unreached_verdict(result)
        if is_unchanged:
            self._say_unchanged_weights(result)

    def refuse_failures(self, result: StepResult) -> None:
        """Raises InterlaceError if all samples of the first step failed, since nothing could be learned."""
        if not self._has_scored and (failed := _list_failures(result)):
            raise InterlaceError(
                f"step {result.step}: all {len(failed)} samples failed, so there is nothing to train on. The first "
                f"failed by {brief(failed[0])}; all reasons are in {self._folder.samples}."
            )

    def _say_failures(self, result: StepResult) -> None:
        """Reports the first step with failed samples; otherwise a run would only seem to learn nothing."""
        if failed := _list_failures(result):
            self.say_once(
                "failures",
                f"step {result.step}: {len(failed)} of {len(result.ended)} samples failed, the first by "
                f"{brief(failed[0])}; all reasons, of later steps too, are in {self._folder.samples}",
            )

    def _say_lost_minibatches(self, result: StepResult) -> None:
        """Reports the first step with failed updates. Minibatches that are skipped by a setting are not reported."""
        for role in ("actor", "critic", "process_reward"):
            if result.metrics.get(f"{role}/{IN_A_ROW}"):
                lost = result.metrics[f"{role}/skipped_minibatches"]
                self.say_once(
                    role,
                    f"step {result.step}: {lost:.0f} of the {role}'s minibatches had a loss or a gradient that is not "
                    f"a finite number, or a learning rate beyond all bounds, and were dropped; "
                    f"{role}/skipped_minibatches counts them",
                )

    def _say_idle_weights(self, result: StepResult) -> None:
        """Reports weights of missing reward parts at the first scored step, which shows the parts of a function."""
        if "weights" in self._told or not self._has_scored:
            return
        self._told.add("weights")
        parts = {name for entry in result.ended for name in entry.sample.reward_parts}
        weights = self._recipe.reward.shaping.weights if self._recipe.reward else {}
        if idle := [name for name in weights if name not in parts]:
            self._progress.say(
                f"step {result.step}: reward.shaping.weights names {', '.join(idle)}, and no reward has a part "
                f"of that name: its weight changes nothing. Parts are: {', '.join(sorted(parts)) or 'none'}"
            )

    def _say_unreached_verdict(self, result: StepResult) -> None:
        """Reports numbers of an own function up to 1 if held-out answers count as right from a larger number on."""
        reward = self._recipe.reward
        scored = [entry.sample for entry in result.ended if entry.sample.reward is not None]
        if reward is None or ":" not in reward.name or any(ACCURACY in sample.reward_parts for sample in scored):
            return
        rewards = (sample.reward_parts.get(TASK, sample.reward or 0.0) for sample in scored)
        most = self._largest_reward = max([self._largest_reward, *rewards])
        self._num_scored_steps += bool(scored)
        if 0 < most <= 1 < reward.correct and self._num_scored_steps >= VERDICT_STEPS:
            self.say_once(
                "verdict",
                f"step {result.step}: the largest reward so far is {most:g}, and a held-out answer counts as right "
                f"from reward.correct={reward.correct:g} on. If {most:g} is the reward of a right answer, set "
                "reward.correct to it",
            )

    def _say_unchanged_weights(self, result: StepResult) -> None:
        """Reports the first publication that did not change the engines' weights although the actor was updated."""
        metrics = result.metrics
        if metrics.get("actor/grad_norm") and not metrics.get("actor/skipped_minibatches"):
            self.say_once(
                "unchanged",
                f"step {result.step}: the actor was updated (gradient norm {metrics['actor/grad_norm']:.2g}, learning "
                f"rate {metrics['actor/lr']:.2g}), and the version that was published is to the bit the one before: "
                "each change was lost in rounding, or is not in what is published",
            )

    def say_once(self, kind: str, text: str) -> None:
        """Reports a sentence of a kind, the first time."""
        if kind not in self._told:
            self._told.add(kind)
            self._progress.say(text)


def _list_failures(result: StepResult) -> list[str]:
    return [entry.reason for entry in result.ended if entry.event == TerminalEvent.FAILED]
