"""Functions of a program that are called after each step of a run."""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import Metrics
from interlace.data.stream import PromptStream
from interlace.rewards.signature import is_async


@dataclass(slots=True, eq=False)
class StepInfo:
    """A finished step, as passed to a callback."""

    step: int
    num_steps: int
    metrics: Mapping[str, float]
    """Metrics of the step, by the names of metrics.jsonl."""
    _stream: PromptStream = field(repr=False)
    logged: Metrics = field(default_factory=dict)
    """Values that callbacks logged."""
    is_last: bool = False
    """True if a callback requested the end of the run."""

    def log(self, name: str, value: float) -> None:
        """Adds a value to the metrics of the step, for metrics.jsonl and every logger.

        Raises UserError for the name of a metric of the run, and for `step`, by which the rows of metrics.jsonl are
        found.
        """
        if name == "step":
            raise UserError("step.log('step', ...): each row of metrics has its step already. Log another name.")
        if name in self.metrics:
            raise UserError(f"log({name!r}): the run has a metric of this name. Choose another, such as 'my/{name}'.")
        self.logged[name] = float(value)

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each source of a mixture, by its name; {} if the prompts are of one source."""
        return self._stream.weights

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes weights of a mixture's sources for all prompts that are drawn from now on.

        weights: relative weights by the name of the source; 0 draws none of its prompts. Other sources keep theirs.
        The next step of an on-policy schedule is drawn by the new weights. An asynchronous schedule has already drawn
        the prompts of up to ceil(max_staleness) further steps, and these stay. Prompts that are drawn again stay, too.
        A checkpoint contains the change, so a resumed run draws the same prompts. Raises UserError, with the sources,
        for an unknown source, a negative or infinite weight, NaN or only zeros; and if the run has no mixture.
        """
        self._stream.set_weights(weights)

    def stop(self) -> None:
        """Ends the run after this step, with a final checkpoint and evaluation."""
        self.is_last = True


Callback: TypeAlias = Callable[[StepInfo], object]
"""Function called as callback(step)."""


class Callbacks:
    """Callbacks of one run."""

    def __init__(self, functions: Sequence[Callback] = ()) -> None:
        """Raises UserError if `functions` is not a list of functions of one argument."""
        if callable(functions):
            raise UserError(f"callbacks is a function: give a list, callbacks=[{_name_callback(functions)}].")
        if not isinstance(functions, Iterable):
            raise UserError(f"callbacks is {functions!r}: give a list of functions, or [] for none.")
        self._functions = tuple(functions)
        for function in self._functions:
            _check_callback(function)
        self.want_stop = False
        """True if a callback requested the end of the run after the last step."""

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float], stream: PromptStream) -> Metrics:
        """Calls each function and returns the values that they logged. Raises InterlaceError if one raises.

        stream: prompts of the run, of which the functions may change the weights.
        """
        if not self._functions:
            return {}
        info = StepInfo(step, num_steps, dict(metrics), stream)
        for function in self._functions:
            try:
                function(info)
            except Exception as error:
                name = _name_callback(function)
                raise InterlaceError(
                    f"callback {name!r} raised {type(error).__name__} after step {step}: {error}"
                ) from error
        self.want_stop = info.is_last
        return info.logged

    async def call_or_save(
        self,
        step: int,
        num_steps: int,
        metrics: Mapping[str, float],
        stream: PromptStream,
        *,
        save: Callable[[], Awaitable[None]],
    ) -> Metrics:
        """Does the same as on_step(). If a function raises, calls `save` before the error ends the run.

        save: logs the step and writes a checkpoint.
        """
        try:
            return self.on_step(step, num_steps, metrics, stream)
        except InterlaceError as error:
            await save()
            error.add_note("The step is saved: the run can be resumed after it.")
            raise


def _check_callback(function: object) -> None:
    """Raises UserError for an object that cannot be called as callback(step)."""
    name = _name_callback(function)
    if not callable(function):
        raise UserError(f"callback {name!r} is not a function: give a function that is called as callback(step).")
    if is_async(function):
        raise UserError(f"callback {name!r} is async: a run calls it between two steps. Give a plain function.")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise UserError(f"callback {name!r} cannot be called as callback(step): {error}.") from None
    except ValueError:  # a function without a signature, of an extension module
        return


def _name_callback(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
