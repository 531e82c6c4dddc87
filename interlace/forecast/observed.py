"""Responses and costs of the last steps of a run, and profiles that are fitted to them."""

from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean

from interlace.core.types import Sample
from interlace.flows.steps import StepResult
from interlace.forecast.profile.types import Profile
from interlace.forecast.search.replanner import CostDrift

KEPT_STEPS = 4
"""Recent steps whose responses give the current length distribution."""
LENGTH_DRIFT = 0.05
"""Relative change of the mean response length since the last search that makes an old plan due again."""
KEPT_SPEEDS = 100
"""Recent steps whose seconds for a token are kept: whole periods of a schedule."""
POINTS = 33
"""Quantiles of a measured distribution."""


class ObservedWorkload:
    """Lengths of recent responses, and costs of rewards and tools relative to the costs in the profile."""

    def __init__(self) -> None:
        self._lengths: deque[list[int]] = deque(maxlen=KEPT_STEPS)
        self._speeds: deque[tuple[float, float]] = deque(maxlen=KEPT_SPEEDS)
        """(seconds, mean length of a response) of recent steps."""
        self._planned_length = 0.0
        """Mean response length at the last search; 0 before, and if that search no longer counts."""
        self.rewards, self.tools = CostDrift(), CostDrift()

    def observe(self, result: StepResult) -> None:
        """Records the responses of a step, the seconds of a call that scores samples, and of a tool's call."""
        lengths = [length for ended in result.ended for length in list_responses(ended.sample)]
        step_s = result.metrics["timing_s/step"]
        self._lengths.append(lengths)
        self._speeds.append((step_s, fmean(lengths or [0])))
        reward_s = result.metrics.get("perf/reward_call_s", 0.0)
        self.rewards.observe(reward_s, reward_s / step_s)
        samples = [ended.sample.counts.tool_s for ended in result.ended if ended.sample.counts]
        calls = [seconds for tool_s in samples for seconds in tool_s]
        if calls:
            self.tools.observe(fmean(calls), sum(calls) / len(samples) / step_s)

    def list_lengths(self, num_steps: int = KEPT_STEPS) -> list[int]:
        """Returns the tokens of the responses of the last steps."""
        return [length for step in list(self._lengths)[-num_steps:] for length in step]

    def find_token_s(self, num_steps: int) -> float:
        """Returns the seconds of the last steps for each token of a mean response in the same steps."""
        last = list(self._speeds)[-max(1, num_steps) :]
        return sum(seconds for seconds, _ in last) / max(1.0, sum(length for _, length in last))

    @property
    def has_other_lengths(self) -> bool:
        """True if responses have other lengths than at the last search, or no search counts."""
        return abs(self._mean_length - self._planned_length) > LENGTH_DRIFT * self._planned_length

    def note_search(self) -> None:
        """Records that a search begins with the present lengths."""
        self._planned_length = self._mean_length

    def forget_search(self) -> None:
        """Makes an old plan due again: the last search gave no plan, or it had other costs."""
        self._planned_length = 0.0

    def scale_costs(self, profile: Profile) -> Iterator[tuple[str, float, Profile]]:
        """Yields (name, ratio, profile with this cost scaled) for rewards and tools if their times have changed."""
        for name, drift, scale in (("rewards", self.rewards, with_rewards), ("tools", self.tools, with_tools)):
            if (ratio := drift.ratio) != 1:
                profile = scale(profile, ratio)
                drift.restart()
                self.forget_search()
                yield name, ratio, profile

    @property
    def _mean_length(self) -> float:
        return fmean(self.list_lengths() or [0])


def list_responses(sample: Sample) -> list[int]:
    """Returns the tokens of each response of a sample; of a sample with several turns, their mean for each turn."""
    turns = max(1, sample.counts.num_turns) if sample.counts else 1
    return [max(1, round(sample.num_sampled / turns))] * turns if sample.num_sampled else []


def with_lengths(profile: Profile, lengths: Sequence[int]) -> Profile:
    """Returns a profile with measured response lengths; the spread between prompts and within one is kept."""
    if len(lengths) < POINTS:
        return profile
    ordered = sorted(lengths)
    quantiles = [float(ordered[round(place / (POINTS - 1) * (len(ordered) - 1))]) for place in range(POINTS)]
    fitted = profile.lengths.model_copy(update={"quantiles": tuple(quantiles)})
    return profile.model_copy(update={"lengths": fitted})


def with_rewards(profile: Profile, factor: float) -> Profile:
    """Returns a profile whose rewards take longer by a factor."""
    reward = profile.reward
    longer = {"median_s": reward.median_s * factor, "max_s": max(reward.max_s, reward.median_s * factor)}
    return profile.model_copy(update={"reward": reward.model_copy(update=longer)})


def with_tools(profile: Profile, factor: float) -> Profile:
    """Returns a profile whose tools take longer by a factor; the same profile if its episodes have no turns."""
    if profile.turns is None:
        return profile
    longer = profile.turns.model_copy(update={"tool_s": tuple(each * factor for each in profile.turns.tool_s)})
    return profile.model_copy(update={"turns": longer})
