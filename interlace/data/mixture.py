"""Draws from several sources by weight, in an order that depends on the seed, the weights and the draw's number."""

import importlib.util
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from interlace.core.config import Config
from interlace.core.errors import UserError, nearest
from interlace.core.plugins import find_class
from interlace.core.random import keyed_random, stable_hash
from interlace.core.types import Prompt
from interlace.data import samplers
from interlace.data.config import DataConfig, SamplerChoice, SourceConfig
from interlace.data.sampling import NoSettings, PromptDraw, PromptSampler, Snapshot

_BLOCK = 64
"""Draws of a block at least; each block has the share of each source to within two draws."""
_LEAST_SHARE = 1e-5
"""Least share of a source: a block has one draw of it, so the size of a block is bounded."""


@dataclass(frozen=True, kw_only=True)
class SampledSource:
    """A source of a mixture."""

    name: str
    weight: float
    """Weight at the start of the run."""
    positions: Sequence[int]
    """Places of its prompts in the mixture."""
    sampler: PromptSampler

    @cached_property
    def place_of(self) -> Mapping[int, int]:
        """Returns the place among its prompts, by position."""
        return {position: place for place, position in enumerate(self.positions)}


class _Change(Config):
    """Weights that are in force from a draw on."""

    start: int
    weights: dict[str, float]


class _State(Config):
    changes: tuple[_Change, ...]
    """Weights since the start of the run."""
    samplers: tuple[JsonValue, ...]
    """State of each source's sampler."""


class MixtureSampler(PromptSampler):
    """Mixes samplers. In each block of draws a source has its share, in a shuffled order of the sources.

    The number of a source's draws before a block follows from the block's number and the changes of the weights, so the
    state is these changes and the state of the sources' samplers.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, parts: Sequence[SampledSource]) -> None:
        """Raises UserError for weights that cannot be drawn by."""
        super().__init__(NoSettings(), prompts, seed)
        self._parts = parts
        self._part_of = {position: number for number, part in enumerate(parts) for position in part.positions}
        self._phases: list[_Phase] = []
        self._start_phase(0, {part.name: part.weight for part in parts})

    @property
    def weights(self) -> Mapping[str, float]:
        return dict(self._phases[-1].weights)

    def set_weights(self, weights: Mapping[str, float], number: int) -> None:
        if unknown := [name for name in weights if name not in self.weights]:
            raise UserError(f"the mixture has no source {unknown[0]!r}. Its sources are: {', '.join(self.weights)}.")
        self._start_phase(number, {**self.weights, **{name: float(weight) for name, weight in weights.items()}})

    def draw(self, number: int) -> PromptDraw:
        source, place = self._find_phase(number).locate_draw(number)
        found = self._parts[source].sampler.draw(place)
        return PromptDraw(self._parts[source].positions[found.position], found.attempt)

    def number_of(self, draw: PromptDraw) -> int | None:
        source = self._part_of[draw.position]
        part = self._parts[source]
        place = part.sampler.number_of(PromptDraw(part.place_of[draw.position], draw.attempt))
        if place is None:
            return None
        after = bisect_right(self._phases, place, key=lambda phase: phase.num_before[source])
        return self._phases[after - 1].number_of(source, place)

    def observe(self, rates: Mapping[int, float]) -> None:
        for part in self._parts:
            part.sampler.observe({part.place_of[at]: rate for at, rate in rates.items() if at in part.place_of})

    def snapshot(self) -> Snapshot:
        taken = [part.sampler.snapshot() for part in self._parts]

        def state(numbers: Sequence[int]) -> JsonValue:
            places: list[list[int]] = [[] for _ in self._parts]
            for number in numbers:
                source, place = self._find_phase(number).locate_draw(number)
                places[source].append(place)
            # Includes a change that a callback makes after the snapshot, at the end of the same step.
            changes = tuple(_Change(start=phase.start, weights=dict(phase.weights)) for phase in self._phases)
            states = tuple(state(own) for state, own in zip(taken, places, strict=True))
            return _State(changes=changes, samplers=states).model_dump(mode="json")

        return state

    def restore(self, state: JsonValue) -> None:
        """Continues from a state. Raises UserError for a state without weights."""
        if not isinstance(state, Mapping):
            raise UserError(
                f"the state of the mixture in the checkpoint is {state!s:.100}: an earlier version of interlace wrote "
                "it, without the weights of the sources, which decide the next prompts. Resume with that version, or "
                "start a new run from the checkpoint's model (model=FOLDER, the folder of the checkpoint)."
            )
        found = _State.parse(cast(Mapping[str, object], state), where="the state of the mixture")
        for change in found.changes:
            self._start_phase(change.start, change.weights)
        for part, own in zip(self._parts, found.samplers, strict=True):
            if own is not None:
                part.sampler.restore(own)

    def _start_phase(self, start: int, weights: Mapping[str, float]) -> None:
        """Draws by these weights from a draw on. A phase that began later, in steps that are repeated, is dropped."""
        before = [phase for phase in self._phases if phase.start < start]
        num_before = before[-1].count_draws(start) if before else [0] * len(self._parts)
        self._phases = [*before, _Phase(start, weights, num_before, self.seed)]

    def _find_phase(self, number: int) -> "_Phase":
        return self._phases[bisect_right(self._phases, number, key=attrgetter("start")) - 1]


class _Phase:
    """Draws between two changes of the weights."""

    def __init__(self, start: int, weights: Mapping[str, float], num_before: Sequence[int], seed: int) -> None:
        """start: number of the first draw. num_before: earlier draws of each source. Raises UserError for weights."""
        self.start, self.weights, self.num_before = start, weights, num_before
        self._seed = seed
        *_, total = sums = list(accumulate(weights.values()))
        _check_weights(weights, total)
        self._ends = [end / total for end in sums]
        self._block = max(_BLOCK, math.ceil(total / min(weight for weight in weights.values() if weight)))
        self._blocks: dict[int, list[int]] = {}

    def locate_draw(self, number: int) -> tuple[int, int]:
        """Returns the source of a draw, and the number of earlier draws of this source."""
        block, offset = divmod(number - self.start, self._block)
        sources = self._order_sources(block)
        source = sources[offset]
        return source, self.num_before[source] + self._num_before(source, block) + sources[:offset].count(source)

    def number_of(self, source: int, place: int) -> int | None:
        """Returns the number of a source's draw. place: number of earlier draws of the source, none before the phase.

        Returns None if the phase does not draw from the source.
        """
        if not [*self.weights.values()][source]:
            return None
        place -= self.num_before[source]
        low, high = 0, place + 1
        while self._num_before(source, high) <= place:  # a block may have no draw of a source with a small weight
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._num_before(source, middle) <= place else (low, middle)
        offsets = [offset for offset, found in enumerate(self._order_sources(low)) if found == source]
        return self.start + low * self._block + offsets[place - self._num_before(source, low)]

    def count_draws(self, end: int) -> list[int]:
        """Counts the draws of each source before a draw of this phase, over all phases."""
        block, offset = divmod(end - self.start, self._block)
        in_block = Counter(self._order_sources(block)[:offset])
        return [
            before + self._num_before(source, block) + in_block[source] for source, before in enumerate(self.num_before)
        ]

    def _num_before(self, source: int, block: int) -> int:
        """Counts a source's draws of the phase in all blocks before one."""
        start = self._ends[source - 1] if source else 0.0
        size = block * self._block
        return math.floor(size * self._ends[source] + 0.5) - math.floor(size * start + 0.5)

    def _order_sources(self, block: int) -> list[int]:
        sources = self._blocks.get(block)
        if sources is None:
            sources = [
                source
                for source in range(len(self._ends))
                for _ in range(self._num_before(source, block + 1) - self._num_before(source, block))
            ]
            phase = (self.start,) if self.start else ()
            keyed_random("mixture of sources", self._seed, *phase, block).shuffle(sources)
            self._blocks = {kept: one for kept, one in self._blocks.items() if abs(kept - block) < 32} | {
                block: sources
            }
        return sources


def _check_weights(weights: Mapping[str, float], total: float) -> None:
    """Raises UserError for weights of sources that cannot be drawn by."""
    given = f"The weights are: {', '.join(f'{name}: {weight}' for name, weight in weights.items())}."
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise UserError(f"weight {weight} of source {name!r}: it must be a finite number, 0 or more. {given}")
        if 0 < weight < total * _LEAST_SHARE:
            raise UserError(
                f"weight {weight} of source {name!r} is less than {_LEAST_SHARE:g} of the sum. Give it a larger "
                f"weight, or 0 to draw none of its prompts. {given}"
            )
    if not total:
        raise UserError(f"all sources have the weight 0: one must have a larger weight. {given}")


def create_sampler(task: DataConfig, prompts: Sequence[Prompt], seed: int) -> PromptSampler:
    """Makes the sampler of a task's training prompts. Raises UserError for an unknown name or setting."""
    if not task.mixture:
        return _create_sampler(task.sampler, prompts, seed)
    parts = []
    for source in task.mixture:
        positions = [place for place, prompt in enumerate(prompts) if prompt.source == source.label]
        own = [prompts[place] for place in positions]
        sampler = _create_sampler(source.sampler, own, stable_hash(seed, "source", source.label))
        parts.append(SampledSource(name=source.label, weight=source.weight, positions=positions, sampler=sampler))
    return MixtureSampler(prompts, seed, parts)


def check_samplers(task: DataConfig) -> None:
    """Raises UserError for an unknown sampler or setting."""
    for choice in _list_choices(task):
        _parse_choice(choice)


def list_learning_samplers(task: DataConfig) -> list[str]:
    """Returns the names of the samplers that read solve rates. Raises UserError as check_samplers()."""
    return [
        choice.name for choice in _list_choices(task) if _parse_choice(choice)[0].observe is not PromptSampler.observe
    ]


def _list_choices(task: DataConfig) -> list[SamplerChoice]:
    return [task.sampler, *(source.sampler for source in task.mixture)]


def _create_sampler(choice: SamplerChoice, prompts: Sequence[Prompt], seed: int) -> PromptSampler:
    kind, settings = _parse_choice(choice)
    return kind(settings, prompts, seed)


def _parse_choice(choice: SamplerChoice) -> tuple[type[PromptSampler], Config]:
    kind = find_class("sampler", samplers, choice.name, PromptSampler)  # type: ignore[type-abstract]
    return kind, kind.Settings.parse(choice.settings, where=f"sampler {choice.name}")


_REGISTERED = re.compile(r"""(?:DATASET_NAME\s*=\s*|register_dataset\(\s*)["'](\w+)["']""")


def check_sources(task: DataConfig) -> None:
    """Raises UserError for an unknown reasoning-gym dataset or sampler, and for limits of a mixture as a whole.

    It imports no data set library.
    """
    if task.mixture and task.max_prompt_tokens is not None:
        raise UserError(
            f"task.max_prompt_tokens={task.max_prompt_tokens}: max_prompt_tokens and overlong of a mixture belong to "
            "each of its sources. Write them there."
        )
    sources: tuple[SourceConfig, ...] = (task, *task.mixture, *task.heldout_sets.values())
    names = {source.reasoning_gym.name for source in sources if source.reasoning_gym is not None}
    for name in sorted(names):
        known = reasoning_gym_names()
        if known and name not in known:
            raise UserError(
                f"unknown reasoning_gym dataset {name!r}.{nearest(name, known)} Rows of your own: task=FILE.jsonl; a "
                "data set of the Hugging Face hub: task=OWNER/NAME."
            )
    check_samplers(task)


@cache
def reasoning_gym_names() -> frozenset[str]:
    """Returns the names of all datasets of reasoning-gym, read from its files: an import takes seconds."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        return frozenset()
    texts = (path.read_text(encoding="utf-8") for path in Path(spec.origin).parent.rglob("*.py"))
    return frozenset(name for text in texts if "register_dataset(" in text for name in _REGISTERED.findall(text))
