"""Result of an evaluation: held-out accuracy and example answers."""

from collections.abc import Mapping

from pydantic import Field

from interlace.core.config import Config
from interlace.core.types import Metrics
from interlace.observe.answers import EvaluationAnswer
from interlace.run.estimates import Estimate


class Evaluation(Config):
    """Accuracy of the policy on held-out prompts. Part of a checkpoint, so that a resumed run has its first value."""

    num_prompts: int
    greedy_accuracy: float
    """Share of prompts answered correctly."""
    sampled_accuracy: float | None
    """Share of correct samples; None if no answers were sampled."""
    answers: tuple[EvaluationAnswer, ...] = Field(repr=False)
    by_set: Mapping[str, tuple[float, float | None]] = Field(default_factory=dict)
    """Greedy and sampled accuracy of each held-out set, by its name; empty for a single set without a name."""
    estimates: Mapping[str, Mapping[str, Estimate]] = Field(default_factory=dict)
    """Estimates with intervals: name of a held-out set or instruction of a robot's task, empty for all prompts ->
    greedy, average@n, pass@k -> value."""
    num_failed: int = 0
    """Number of answers that could not be scored; they count as wrong."""
    failure: str = ""
    """Reason of the first scoring failure."""

    def __repr__(self) -> str:
        """Returns one line for each accuracy, with its 95 % interval if there is one."""
        has_intervals = any(each.low is not None for found in self.estimates.values() for each in found.values())
        lines = [f"Held-out accuracy of {self.num_prompts} prompts{', with 95 % intervals' if has_intervals else ''}"]
        for name, found in self.estimates.items():
            lines += [f"  {f'{name}, ' if name else ''}{kind}: {each}" for kind, each in found.items()]
        if not self.estimates:
            lines.append(f"  greedy: {self.greedy_accuracy:.3f}")
            lines += [] if self.sampled_accuracy is None else [f"  sampled: {self.sampled_accuracy:.3f}"]
        if self.warning:
            lines.append(f"  {self.warning}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return repr(self)

    @property
    def warning(self) -> str:
        """Returns a sentence that limits the meaning of the accuracy; empty if all answers were scored."""
        if not self.num_failed:
            return ""
        return f"{self.num_failed} answers count as wrong since scoring them failed, the first by {self.failure}"

    def metrics(self) -> Metrics:
        """Returns the accuracies as metrics."""
        sampled = {} if self.sampled_accuracy is None else {"eval/accuracy_sampled": self.sampled_accuracy}
        sets: Metrics = {}
        for name, found in self.estimates.items():
            prefix = f"eval/{name}/" if name else "eval/"
            sets |= {f"{prefix}{kind}": each.value for kind, each in found.items() if kind.startswith("pass@")}
        for name, (greedy, drawn) in self.by_set.items():
            sets[f"eval/{name}/accuracy_greedy"] = greedy
            if drawn is not None:
                sets[f"eval/{name}/accuracy_sampled"] = drawn
        count = {"eval/num_prompts": float(self.num_prompts)}
        return {"eval/accuracy_greedy": self.greedy_accuracy, **sampled, **sets, **count}
