"""The stream of prompts of a run, exactly resumable."""

import hashlib
import json
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from pydantic import JsonValue

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.types import Prompt
from interlace.data.samplers.shuffle import Shuffle
from interlace.data.sampling import NoSettings, PromptDraw, PromptSampler, mean_rates


class StreamState(Config):
    """Position of a stream; part of a checkpoint."""

    drawn: int = 0
    """Draws so far; a prompt that was handed back counts once."""
    pending: tuple[int, ...] = ()
    """Numbers of draws to serve before new ones, ascending."""
    fingerprint: int
    """Fingerprint of the prompts, with their content, and of the seed: a stream is restored only over the same ones."""
    sampler: JsonValue = None
    """State of the sampler; None if its draws follow from their numbers."""


class PromptStream:
    """Serves prompts without end, in the order of a sampler; each prompt has its epoch as `attempt`.

    A prompt that was served but not trained on is handed back and served again before new ones, in the original order:
    none is skipped or served twice. Not safe for threads.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        sampler: PromptSampler | None = None,
        *,
        generated: Collection[str] = (),
    ) -> None:
        """prompts: in a fixed order, with distinct uids. sampler: of these prompts; None shuffles each epoch.

        generated: names of sources (Prompt.source) whose prompts are identified by their uids alone, because a
        generator may word the same question differently in another process.

        Raises ValueError without prompts, or if a uid repeats.
        """
        self._prompts = tuple(prompts)
        self._position = {prompt.uid: index for index, prompt in enumerate(self._prompts)}
        if not self._prompts or len(self._position) != len(self._prompts):
            raise ValueError(f"{len(self._prompts)} prompts with {len(self._position)} distinct uids: need one or more")
        self._seed, self._generated = seed, frozenset(generated)
        self._sampler = sampler or Shuffle(NoSettings(), self._prompts, seed)
        self._drawn = 0
        self._pending: list[int] = []

    @cached_property
    def _fingerprint(self) -> int:
        return stable_hash(self._seed, *(self._describe_prompt(prompt) for prompt in self._prompts))

    def _describe_prompt(self, prompt: Prompt) -> str:
        if prompt.source in self._generated:
            return prompt.uid
        # Without the tokens: a chat template may write the date.
        content = json.dumps([prompt.text, prompt.answer, dict(prompt.metadata)], sort_keys=True)
        return f"{prompt.uid} {hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}"

    def __iter__(self) -> Iterator[Prompt]:
        return self

    @property
    def exhausted(self) -> bool:
        """Returns False: a stream does not end."""
        return False

    def __next__(self) -> Prompt:
        if self._pending:
            return self._draw_prompt(self._pending.pop(0))
        self._drawn += 1
        return self._draw_prompt(self._drawn - 1)

    def hand_back(self, prompts: Iterable[Prompt]) -> None:
        """Serves prompts of this stream again, before new ones. Raises ValueError for any other prompt."""
        for draw in self._find_numbers(prompts, self._drawn, self._pending):
            insort(self._pending, draw)

    def take(self, uid: str, epoch: int) -> Prompt:
        """Serves a prompt that was handed back, out of turn. Raises UserError if it is not waiting."""
        position = self._position.get(uid)
        number = None if position is None else self._sampler.number_of(PromptDraw(position, epoch))
        if number is None or number not in self._pending:
            raise UserError(
                f"the checkpoint has a group in flight of prompt {uid!r} of epoch {epoch}, and this prompt is not "
                "among those to draw again: state.json was edited. Resume from an earlier checkpoint."
            )
        self._pending.remove(number)
        return self._draw_prompt(number)

    def observe(self, solved: Iterable[tuple[str, float]]) -> None:
        """Gives the sampler the results of trained samples: uid of the prompt, and 1 if solved, else 0."""
        self._sampler.observe(mean_rates((self._position[uid], rate) for uid, rate in solved if uid in self._position))

    @property
    def weights(self) -> Mapping[str, float]:
        """Returns the weight of each source of a mixture, by its name; {} if the prompts are of one source."""
        return self._sampler.weights

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes the weights of a mixture's sources, from the next new draw on. Prompts handed back stay as drawn.

        The change is part of each state that is made later. Raises UserError for weights that cannot be drawn by.
        """
        self._sampler.set_weights(weights, self._drawn)

    def state(self, unfinished: Iterable[Prompt] = ()) -> StreamState:
        """Returns the state for `restore`. unfinished: prompts served and not trained on; they are served first.

        Does not change the stream. Raises ValueError for a prompt that the stream did not serve.
        """
        return self.state_later(unfinished)()

    def state_later(self, unfinished: Iterable[Prompt]) -> Callable[[], StreamState]:
        """Returns a function that gives the present state at any later time: the search for draw numbers is slow."""
        drawn, waiting, out = self._drawn, tuple(self._pending), tuple(unfinished)
        sampler = self._sampler.snapshot()

        def state() -> StreamState:
            pending = sorted([*waiting, *self._find_numbers(out, drawn, waiting)])
            return StreamState(
                drawn=drawn, pending=tuple(pending), fingerprint=self._fingerprint, sampler=sampler(pending)
            )

        return state

    def restore(self, state: StreamState) -> None:
        """Continues from a state. Raises UserError for a state of other prompts or of another seed."""
        if state.fingerprint != self._fingerprint:
            raise UserError(
                "the prompts of the checkpoint are not the prompts of this run: its data settings, a data file or the "
                "seed changed. Resume with the run's own config.yaml, or start a new run from the checkpoint's model."
            )
        self._drawn, self._pending = state.drawn, list(state.pending)
        if state.sampler is not None:
            self._sampler.restore(state.sampler)

    def _find_numbers(self, prompts: Iterable[Prompt], drawn: int, pending: Iterable[int]) -> list[int]:
        """Returns the numbers of the draws of these prompts; each must be in use, and appear once.

        drawn, pending: state of the stream while the prompts were in use.
        """
        found: list[int] = []
        waiting = set(pending)
        for prompt in prompts:
            position = self._position.get(prompt.uid)
            number = None if position is None else self._sampler.number_of(PromptDraw(position, prompt.attempt))
            if number is None or number >= drawn or number in waiting:
                raise ValueError(f"prompt {prompt.uid!r} of epoch {prompt.attempt} is not in use")
            waiting.add(number)
            found.append(number)
        return found

    def _draw_prompt(self, number: int) -> Prompt:
        position, attempt = self._sampler.draw(number)
        prompt = self._prompts[position]
        return prompt if attempt == prompt.attempt else replace(prompt, attempt=attempt)
