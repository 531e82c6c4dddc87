"""Notes about a step tell the user what a metric alone does not show."""

from dataclasses import replace
from pathlib import Path

import pytest

from interlace.core.types import EMPTY_INT, Prompt, Sample, SampleKey, TerminalEvent
from interlace.flows.steps import Ended, StepResult
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.run.recipe.load import load_recipe
from interlace.run.step_boundary import StepNotes


class Said(QuietProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("reward", "given", "parts", "is_said"),
    [
        ("mine:score", 1.0, {}, True),
        ("{name: mine:score, correct: 1}", 1.0, {}, False),
        ("mine:score", -5.0, {"accuracy": 0.0}, False),
        ("mine:score", 3.0, {}, False),
        ("exact", 1.0, {}, False),
    ],
)
def test_numbers_up_to_1_that_can_never_count_as_right_are_reported(
    tmp_path: Path, reward: str, given: float, parts: dict[str, float], is_said: bool
) -> None:
    """A recipe's reward counts as right from 5 on, so that the accuracy of a function that gives 1 was always 0."""
    progress = Said()
    notes = StepNotes(load_recipe("quickstart", [f"reward={reward}"]), RunFolder(path=tmp_path), progress)
    prompt = Prompt(uid="rows:1", token_ids=EMPTY_INT, text="q", answer="a")
    scored = [Sample(key=SampleKey(0, 0), prompt=prompt, reward=given, reward_parts=parts)]
    if is_said:  # a response without the tag of the reward has a verdict
        scored.append(replace(scored[0], key=SampleKey(0, 1), reward=-5.0, reward_parts={"accuracy": 0.0}))
    ended = [Ended(sample=sample, event=TerminalEvent.TRAINED) for sample in scored]
    for step in range(1, 8):
        notes.say(StepResult(step=step, version=step, metrics={}, ended=ended), is_unchanged=False)
    assert [line.startswith("step 5: the largest reward so far is 1, and") for line in progress.lines] == [
        True
    ] * is_said
