"""The order in which prompts are served, exactly resumable."""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.random import permutation, stable_hash
from interlace.core.types import Prompt


class StreamState(Config):
    """Position of a stream; part of a checkpoint."""

    drawn: int = 0
    """Draws so far, prompts that were handed back counted once."""
    pending: tuple[int, ...] = ()
    """Numbers of draws to serve before new ones, ascending."""
    fingerprint: int
    """Fingerprint of the prompts and the seed: a stream is restored only over the same ones."""


class PromptStream:
    """Serves prompts over epochs: each time every prompt once, in an order keyed by (seed, epoch), its `attempt`.

    Draw n is prompt permutation(epoch)[n % size] of epoch n // size, so a state is a few numbers, and a prompt tells
    its draw. One that was drawn but not trained on is handed back and served again before new ones, in the original
    order: none is skipped, none comes twice. Not safe for threads.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        """prompts: in a fixed order, with distinct uids. Raises ValueError where there is none or a uid repeats."""
        self._prompts = tuple(prompts)
        self._position = {prompt.uid: index for index, prompt in enumerate(self._prompts)}
        if not self._prompts or len(self._position) != len(self._prompts):
            raise ValueError(f"{len(self._prompts)} prompts with {len(self._position)} distinct uids: need one or more")
        self._seed = seed
        self._drawn = 0
        self._pending: list[int] = []
        self._orders: dict[int, list[int]] = {}

    @cached_property
    def _fingerprint(self) -> int:
        return stable_hash(self._seed, *(prompt.uid for prompt in self._prompts))

    def __iter__(self) -> Iterator[Prompt]:
        return self

    @property
    def exhausted(self) -> bool:
        """Returns False: after an epoch comes the next."""
        return False

    def __next__(self) -> Prompt:
        """Returns the next prompt; there is always one."""
        if self._pending:
            return self._prompt(self._pending.pop(0))
        self._drawn += 1
        return self._prompt(self._drawn - 1)

    def hand_back(self, prompts: Iterable[Prompt]) -> None:
        """Serves these, which this stream gave out, again before new ones. Raises ValueError for any other prompt."""
        for draw in self._draws(prompts, self._drawn, self._pending):
            insort(self._pending, draw)

    def state(self, unfinished: Iterable[Prompt] = ()) -> StreamState:
        """Returns what `restore` needs. unfinished: prompts given out and not trained on; they are served first.

        This stream goes on as it is. Raises ValueError for a prompt that this stream has not out.
        """
        return self.state_later(unfinished)()

    def state_later(self, unfinished: Iterable[Prompt]) -> Callable[[], StreamState]:
        """Returns a function that gives the present state whenever called: finding the draws' numbers takes time."""
        drawn, waiting, out = self._drawn, tuple(self._pending), tuple(unfinished)

        def state() -> StreamState:
            pending = sorted([*waiting, *self._draws(out, drawn, waiting)])
            return StreamState(drawn=drawn, pending=tuple(pending), fingerprint=self._fingerprint)

        return state

    def restore(self, state: StreamState) -> None:
        """Goes on from a state. Raises UserError where it is of other prompts or another seed."""
        if state.fingerprint != self._fingerprint:
            raise UserError(
                "the checkpoint's prompts are not this run's: its data settings, a data file or the seed changed. "
                "Resume with the run's own config.yaml, or start a new run from the checkpoint's model."
            )
        self._drawn, self._pending = state.drawn, list(state.pending)

    def _draws(self, prompts: Iterable[Prompt], drawn: int, pending: Iterable[int]) -> list[int]:
        """Numbers of the draws that gave these prompts; each must be out, and named once.

        drawn, pending: those of when the prompts were out.
        """
        found: list[int] = []
        waiting = set(pending)
        for prompt in prompts:
            draw = self._draw_of(prompt)
            if draw is None or draw >= drawn or draw in waiting:
                raise ValueError(f"prompt {prompt.uid!r} of epoch {prompt.attempt} is not out")
            waiting.add(draw)
            found.append(draw)
        return found

    def _draw_of(self, prompt: Prompt) -> int | None:
        index = self._position.get(prompt.uid)
        if index is None:
            return None
        return prompt.attempt * len(self._prompts) + self._order(prompt.attempt).index(index)

    def _prompt(self, draw: int) -> Prompt:
        epoch, position = divmod(draw, len(self._prompts))
        prompt = self._prompts[self._order(epoch)[position]]
        return prompt if epoch == prompt.attempt else replace(prompt, attempt=epoch)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            # Two epochs can be out at once where the gate lets generation run over an epoch's end.
            self._orders = {kept: order for kept, order in self._orders.items() if kept >= epoch - 1}
            self._orders[epoch] = permutation(len(self._prompts), "prompts", self._seed, epoch)
        return self._orders[epoch]
