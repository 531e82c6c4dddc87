"""Callbacks see each step, log values, and may stop the run."""

import pytest

from interlace.core.errors import InterlaceError, UserError
from interlace.data.stream import PromptStream
from interlace.run.callbacks import Callbacks, StepInfo
from tests.unit.data.test_stream import prompts

STREAM = PromptStream(prompts(2), seed=0)


def test_what_a_callback_logs_is_a_metric_and_a_stop_is_of_its_step() -> None:
    def watch(step: StepInfo) -> None:
        step.log("mine", step.metrics["reward/mean"] * 2)
        if step.step == 2:
            step.stop()

    callbacks = Callbacks([watch])
    assert callbacks.on_step(1, 5, {"reward/mean": 1.0}, STREAM) == {"mine": 2.0}
    assert not callbacks.want_stop
    callbacks.on_step(2, 5, {"reward/mean": 1.0}, STREAM)
    assert callbacks.want_stop
    callbacks.on_step(1, 5, {"reward/mean": 1.0}, STREAM)  # repeated after a loss
    assert not callbacks.want_stop


def test_a_callback_that_raises_ends_the_run_by_its_name() -> None:
    def broken(step: StepInfo) -> None:
        raise KeyError("no such metric")

    with pytest.raises(InterlaceError, match="callback 'broken' raised KeyError after step 3"):
        Callbacks([broken]).on_step(3, 5, {}, STREAM)


async def watch_later(step: StepInfo) -> None:
    step.stop()


def test_a_callback_does_not_replace_a_metric_of_the_run() -> None:
    def replace(step: StepInfo) -> None:
        step.log("reward/mean", 99)

    with pytest.raises(InterlaceError, match="the run has a metric of this name"):
        Callbacks([replace]).on_step(3, 5, {"reward/mean": 0.5}, STREAM)


def test_a_callback_cannot_change_the_number_of_the_step() -> None:
    with pytest.raises(InterlaceError, match="each row of metrics has its step already"):
        Callbacks([lambda step: step.log("step", step.step / 2)]).on_step(3, 5, {}, STREAM)


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (print, r"give a list, callbacks=\[print\]"),
        ([lambda: None], "cannot be called as callback\\(step\\): too many positional arguments"),
        (["watch"], "callback 'str' is not a function"),
        (None, "callbacks is None: give a list"),
        ([watch_later], "callback 'watch_later' is async"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused(functions: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Callbacks(functions)  # type: ignore[arg-type]
