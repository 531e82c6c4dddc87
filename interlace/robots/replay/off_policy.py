"""Learning from single turns of replayed trajectories, by an off-policy algorithm (SAC, IQL, AWR)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from interlace.algorithms.advantages import list_trained_turns, turn_rewards
from interlace.algorithms.replayed import ReplayedSettings
from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.transitions import EpisodeSteps, TransitionBatch, n_step_transitions
from interlace.core.types import FINAL, FloatArray, IntArray, Metrics, Sample, Segment
from interlace.models.inputs import STATE
from interlace.robots.replay.buffer import Replay
from interlace.rollouts.role_groups import ActorGroup

BLOCK_BYTES = 64 << 20
"""Largest size of the batches of one call of the actor."""
PRIORITIES_FILE = "priorities.npz"
SMALLEST_PRIORITY = 1e-6
"""Number added to an error, so that each turn can be drawn again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Priorities:
    """Draws of turns by the critics' error (prioritised experience replay, arXiv 1511.05952)."""

    exponent: float
    """Exponent of an error in the probability of a draw."""
    importance: float
    """Exponent β of the weights that correct for the draws."""

    def weights(self, chances: NDArray[np.float64], num_turns: int, num_shown: int) -> FloatArray:
        """Returns the weights [updates, n + num_shown] of the turns of each batch.

        A weight is (N * P)^-β, with N turns in the table and the probability P of a draw. All are divided by the
        largest weight of their batch, so that they only lower the update (section 3.4). The largest weight of the whole
        table may belong to one turn with a tiny error; divided by it, all other weights would be almost 0.
        chances: [updates, n] probabilities of the drawn turns. num_turns: turns in the table. num_shown: demonstrated
        turns of a batch, which are drawn uniformly.
        """
        own = (num_turns * chances) ** -self.importance
        every = np.pad(own, ((0, 0), (0, num_shown)), constant_values=1)
        return (every / every.max(axis=1, keepdims=True)).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Draws:
    """Batches of the updates of a step."""

    batches: list[TransitionBatch]
    places: NDArray[np.int64]
    """[updates, n] places of the replayed turns in the table; further turns of a batch are demonstrated."""
    weights: list[FloatArray]
    """[B] of each batch; empty for uniform draws."""


class TransitionTable:
    """Transitions of episodes, drawn by place."""

    def __init__(self) -> None:
        self._parts: dict[int, TransitionBatch] = {}
        """Transitions of each episode, by its number."""
        self._priorities: dict[int, FloatArray] = {}
        """Priorities of the transitions of each episode."""
        self._restored: dict[int, FloatArray] = {}
        """Priorities of a checkpoint, until their episodes are added."""

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts.values())

    def follow(self, replay: Replay, convert: Callable[[Sample], TransitionBatch]) -> None:
        """Adds the transitions of new trajectories of a replay, and removes the transitions of evicted ones."""
        # Evictions come first: the priority of a new episode then depends on stored ones alone, also after a resume.
        for number in self._parts.keys() - replay.uses().keys():
            del self._parts[number], self._priorities[number]
        for number, sample in replay.contents(self._parts.keys()):
            self.add(number, convert(sample))

    def add(self, number: int, transitions: TransitionBatch) -> None:
        """Adds the transitions of one episode, with the largest priority so far."""
        largest = max((float(each.max()) for each in self._priorities.values()), default=1.0)
        self._parts[number] = transitions
        self._priorities[number] = self._restored.pop(number, np.full(len(transitions), largest, np.float32))

    def priorities(self) -> FloatArray:
        """Returns the priorities [transitions], in the order of draw()."""
        return np.concatenate([self._priorities[number] for number in sorted(self._parts)])

    def set_priorities(self, places: NDArray[np.int64], values: FloatArray) -> None:
        """Changes priorities by place; the last of several values for a place counts."""
        whole = self.priorities()
        whole[places] = values
        numbers = sorted(self._parts)
        ends = np.cumsum([len(self._parts[number]) for number in numbers])
        self._priorities = dict(zip(numbers, np.split(whole, ends[:-1]), strict=True))

    def save(self, folder: Path) -> None:
        """Writes the priorities into a checkpoint's folder."""
        arrays: dict[str, Any] = {str(number): each for number, each in self._priorities.items()}
        np.savez(folder / PRIORITIES_FILE, **arrays)

    def restore(self, folder: Path) -> None:
        """Reads priorities that save() wrote. Raises UserError if the file is missing or damaged."""
        path = folder / PRIORITIES_FILE
        try:
            with np.load(path) as stored:
                self._restored = {int(name): np.asarray(stored[name], np.float32) for name in stored}
        except (OSError, ValueError, BadZipFile) as error:
            raise UserError(f"{path} is damaged ({error}). Delete {folder} to resume from the one before.") from None

    def draw(self, places: NDArray[np.int64]) -> TransitionBatch:
        """Returns the transitions with the given indices, counted in order of the episodes' numbers."""
        numbers = sorted(self._parts)
        ends = np.cumsum([len(self._parts[number]) for number in numbers])
        owners = np.searchsorted(ends, places, side="right")
        order = np.argsort(owners, kind="stable")
        found, parts = np.unique(owners[order], return_index=True), []
        begins = [*found[1].tolist(), len(places)]
        for owner, begin, end in zip(found[0].tolist(), begins[:-1], begins[1:], strict=True):
            part = self._parts[numbers[owner]]
            parts.append(part.take(places[order[begin:end]] - (ends[owner] - len(part))))
        back = np.empty(len(places), np.int64)
        back[order] = np.arange(len(places))
        return TransitionBatch.joined(parts).take(back)


@dataclass(kw_only=True, slots=True, eq=False)
class OffPolicy:
    """Off-policy learner of a run: its transitions, and the updates of each step."""

    settings: ReplayedSettings
    seed: int
    demonstrations: TransitionBatch | None = None
    """Demonstrated transitions, of which half of each batch is drawn (RLPD, arXiv 2302.02948); None for none."""
    table: TransitionTable = field(default_factory=TransitionTable)
    priorities: Priorities | None = None
    """Draws by priority; None for uniform draws."""
    context_ids: IntArray | None = None
    """Tokens before an answer; None before the first episode."""
    bounds: tuple[FloatArray, FloatArray] | None = None
    """[C] smallest and largest numbers of a chunk that the simulator executes unchanged, for algorithms that imitate
    executed actions. If None, actions are the numbers of the answer."""

    def convert(self, sample: Sample) -> TransitionBatch:
        """Returns the transitions of a sample. Raises UserError if earlier samples have another context."""
        context = context_of(sample)
        if self.context_ids is None:
            self.context_ids = context
        if not np.array_equal(self.context_ids, context):
            raise UserError(
                "an off-policy algorithm trains one instruction, because its critics see the state alone, and the "
                f"episode of {sample.prompt.text!r} has another. Keep one instruction in task.starts.instructions."
            )
        steps = steps_of(sample)
        if self.bounds is not None:
            steps = replace(steps, actions=np.clip(steps.actions, *self.bounds))
        return n_step_transitions(steps, n=self.settings.n_step, gamma=self.settings.gamma)

    async def learn_offline(self, actor: ActorGroup) -> Metrics:
        """Makes the updates from the demonstrations alone. Returns the metrics of the last calls of the actor."""
        shown, context, count = self.demonstrations, self.context_ids, self.settings.offline_updates
        if shown is None or context is None or not count:
            return {}
        size, parts = self.settings.turns_per_update, []
        per_call = max(1, BLOCK_BYTES // max(1, _count_bytes(shown.take(np.zeros(size, np.int64)))))
        async with actor.hold("replay"):
            for begin in range(0, count, per_call):
                draw = np.random.default_rng(stable_hash("offline", self.seed, begin))
                num = min(per_call, count - begin)
                batches = _cut_transitions(shown.take(draw.integers(len(shown), size=num * size)), num)
                parts.append((await actor.learn(context, batches)).metrics)
        return _average_metrics(parts[-1:])

    async def learn(self, step: int, replay: Replay, num_turns: int, actor: ActorGroup) -> Metrics:
        """Makes the updates of a step. The draws depend on the step and the stored trajectories alone.

        num_turns: turns that the step added. Returns the metrics.
        """
        self.table.follow(replay, self.convert)
        size = len(self.table)
        metrics: Metrics = {"replay/transitions": size}
        count = self._count_updates(step, num_turns)
        if size < self.settings.start_turns or self.context_ids is None or not count:
            return metrics
        draws = self._draw_batches(step, count, size)
        parts = await self._update_actor(actor, draws, self.context_ids)
        return metrics | _average_metrics(parts) | {"off_policy/updates": count}

    def _count_updates(self, step: int, num_turns: int) -> int:
        """Returns the updates of a step. A fraction of an update is the probability of one more."""
        draw = np.random.default_rng(stable_hash("number of updates", self.seed, step))
        return int(self.settings.updates_per_turn * num_turns + draw.random())

    async def _update_actor(self, actor: ActorGroup, draws: _Draws, context: IntArray) -> list[Metrics]:
        per_call = max(1, BLOCK_BYTES // max(1, _count_bytes(draws.batches[0])))
        found = []
        async with actor.hold("replay"):
            for begin in range(0, len(draws.batches), per_call):
                end = begin + per_call
                done = await actor.learn(context, draws.batches[begin:end], draws.weights[begin:end])
                found.append(done.metrics)
                for places, errors in zip(draws.places[begin:end], done.errors, strict=False):
                    self.table.set_priorities(places, errors[: len(places)] + SMALLEST_PRIORITY)
        return found

    def _draw_batches(self, step: int, count: int, size: int) -> _Draws:
        """Draws the batches of all updates of a step, before its first update."""
        shown, rule = self.demonstrations, self.priorities
        draw = np.random.default_rng(stable_hash("transitions", self.seed, step))
        num_shown = self.settings.turns_per_update // 2 if shown is not None else 0
        num_own = self.settings.turns_per_update - num_shown
        weights: list[FloatArray] = []
        if rule is None:
            places = draw.integers(size, size=count * num_own)
        else:
            chances = self.table.priorities().astype(np.float64) ** rule.exponent
            chances /= chances.sum()
            places = draw.choice(size, size=count * num_own, p=chances)
            weights = [*rule.weights(chances[places].reshape(count, num_own), size, num_shown)]
        parts = _cut_transitions(self.table.draw(places), count)
        if shown is not None:
            others = _cut_transitions(shown.take(draw.integers(len(shown), size=count * num_shown)), count)
            parts = [TransitionBatch.joined(pair) for pair in zip(parts, others, strict=True)]
        return _Draws(batches=parts, places=places.reshape(count, num_own), weights=weights)


def context_of(sample: Sample) -> IntArray:
    """Returns the tokens that the first turn of an episode read. Raises UserError if it read no state."""
    first = sample.segments[0]
    before = () if first.parent is None else sample.prompt.token_ids
    return np.concatenate([np.asarray(before, np.int32), first.token_ids])


def steps_of(sample: Sample) -> EpisodeSteps:
    """Converts a robot's sample, whose answers are numbers, to the steps of an episode.

    An episode whose last context is marked FINAL was cut off, so its last state has a value (episode.bootstrap).
    Raises UserError for samples whose turns have no `state`.
    """
    turns = [each for each in sample.segments if each.kind != FINAL and (each.sampled is None or each.sampled.any())]
    states = [_read_state(sample, turn) for turn in turns]
    last = sample.segments[-1]
    is_terminal = last.kind != FINAL
    states.append(states[-1] if is_terminal else _read_state(sample, last))
    executed = turns[-1].sampled
    return EpisodeSteps(
        states=np.stack(states),
        actions=np.stack([np.ascontiguousarray(turn.token_ids, np.int32).view(np.float32) for turn in turns]),
        rewards=turn_rewards(sample, list_trained_turns(sample)),
        is_terminal=is_terminal,
        last_share=1.0 if executed is None else float(executed.mean()),
    )


def _read_state(sample: Sample, turn: Segment) -> FloatArray:
    """Returns the state [F] that a turn read: from its arrays, or from the arrays of its context."""
    context = sample.segments[turn.parent] if turn.parent is not None and turn.parent >= 0 else turn
    inputs = turn.inputs if turn.inputs is not None else context.inputs
    state = None if inputs is None else inputs.get(STATE)
    if state is None:
        raise UserError(f"sample {sample.key} has a turn without a `state`: off-policy learning needs state vectors.")
    return np.asarray(state, np.float32).reshape(-1)


def _cut_transitions(transitions: TransitionBatch, count: int) -> list[TransitionBatch]:
    """Cuts transitions into `count` parts of equal size."""
    size = len(transitions) // count
    return [transitions.take(np.arange(begin, begin + size)) for begin in range(0, count * size, size)]


def _count_bytes(batch: TransitionBatch) -> int:
    return batch.states.nbytes + batch.actions.nbytes + batch.next_states.nbytes + 8 * len(batch)


def _average_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Returns the means of metrics over calls. A call that did not update the policy lacks the policy's metrics."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: fmean(part[name] for part in parts if name in part) for name in names}
