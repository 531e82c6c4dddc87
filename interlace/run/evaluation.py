"""Held-out accuracy: what an evaluation found."""

from collections.abc import Mapping

from pydantic import Field

from interlace.core.config import Config
from interlace.core.types import Metrics


class Answer(Config):
    """One answer to a held-out prompt, kept to be shown."""

    uid: str
    prompt: str
    right_answer: str
    response: str
    correct: bool


class Evaluation(Config):
    """How the policy does on held-out prompts. Part of a checkpoint, so that a resumed run still knows its start."""

    num_prompts: int
    greedy_accuracy: float
    """Share of prompts answered correctly."""
    sampled_accuracy: float | None
    """Share of samples that are correct; None where none were asked for."""
    answers: tuple[Answer, ...]
    by_set: Mapping[str, tuple[float, float | None]] = Field(default_factory=dict)
    """Greedy and sampled accuracy of each held-out set, by its name; empty for a single set without a name."""
    num_failed: int = 0
    """Answers that could not be scored, which count as wrong."""
    failure: str = ""
    """Why the first of them could not."""

    @property
    def warning(self) -> str:
        """A sentence where an accuracy tells less than it seems to; empty where it does not."""
        if not self.num_failed:
            return ""
        return f"{self.num_failed} answers count as wrong since scoring them failed, the first by {self.failure}"

    def metrics(self) -> Metrics:
        """Returns the numbers as they are logged."""
        sampled = {} if self.sampled_accuracy is None else {"eval/accuracy_sampled": self.sampled_accuracy}
        sets = {}
        for name, (greedy, drawn) in self.by_set.items():
            sets[f"eval/{name}/accuracy_greedy"] = greedy
            if drawn is not None:
                sets[f"eval/{name}/accuracy_sampled"] = drawn
        count = {"eval/num_prompts": float(self.num_prompts)}
        return {"eval/accuracy_greedy": self.greedy_accuracy, **sampled, **sets, **count}
