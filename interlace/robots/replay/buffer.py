"""Replay buffer: stores trajectories and draws them again by age, version and priority.

On-policy training uses the channel, each sample once. The replay buffer is for learners that use a trajectory several
times: a policy gradient with bounded staleness, imitation of successes, a world model. It counts every use.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.types import Sample
from interlace.robots.experts import ExpertConfig
from interlace.robots.replay.files import FilePlace, ReplayFiles
from interlace.robots.replay.trajectory_file import sample_from_bytes, sample_nbytes, sample_to_bytes

FloatRow: TypeAlias = NDArray[np.float64]
_INDEX = "replay.json"


class ReplayConfig(Config):
    """Settings of a replay buffer: its size, and the rule of draws."""

    capacity: int = Field(default=4096, ge=1)
    """Capacity in trajectories; when it is exceeded, the oldest are evicted."""
    in_memory_mib: float = Field(default=256.0, ge=0)
    """Memory for trajectories, in MiB; the least recently used ones beyond it are read from disk when they are drawn.
    """
    order: Literal["uniform", "newest", "oldest", "priority"] = "uniform"
    """Order of draws among the eligible trajectories: uniform, the newest or oldest first, or by priority."""
    priority_exponent: float = Field(default=1.0, ge=0)
    """Exponent of the priority in a trajectory's weight, for `priority`; 0 is uniform."""
    max_versions_behind: int | None = Field(default=None, ge=0)
    """Largest lag in versions between a trajectory's oldest tokens and the current weights. If None, no limit."""
    max_rounds: int | None = Field(default=None, ge=0)
    """Largest age of a trajectory, in calls of add(). If None, no limit."""
    max_uses: int | None = Field(default=None, ge=1)
    """Draws after which a trajectory is evicted. If None, no limit."""


class ReplayLearnerConfig(ReplayConfig):
    """Recipe's section `replay`: the buffer, and the policy's updates from it after each step."""

    learner: Literal["imitation", "policy_gradient", "actor_critic", "expert", "demonstrations"] = "imitation"
    """actor_critic: the updates of an off-policy algorithm (sac, iql, awr), on single turns; its settings replace the
    next ones. expert: imitates the labels of an expert in the episodes' observations (dagger). demonstrations: imitates
    `experts`, and stores no episodes (bc).
    imitation: imitates trajectories of sufficient reward, with equal weight for each token (behaviour cloning).
    policy_gradient: the algorithm's loss, with the advantages of the first training and the ratio to the sampling
    policy; needs max_versions_behind."""
    updates: int = Field(default=1, ge=0)
    """Optimizer updates per step, after the updates on the step's samples. At 0, the buffer serves only other learners.
    """
    draw_size: int = Field(default=64, ge=1)
    """Largest number of trajectories per update; of learner demonstrations, states with the expert's next chunk."""
    loss_weight: float = Field(default=1.0, gt=0)
    """Factor of the loss, and so of the gradient. The optimizer is shared with the step's on-policy updates."""
    demonstrations: str | None = None
    """Data set of which actor_critic draws half of each batch (RLPD): a LeRobotDataset (v3), a folder of Minari, or an
    .hdf5 file of robomimic or LIBERO. None for none."""
    experts: ExpertConfig | None = None
    """Demonstrations that learner demonstrations imitates: of a scripted expert, recorded at the start of the run, or
    of a data set. None for every other learner."""
    importance_exponent: float = Field(default=0.4, ge=0, le=1)
    """Exponent of the weights by which actor_critic corrects for draws by priority; 1 corrects fully. The weights are
    divided by the largest of their batch."""
    imitate_from: float = 1.0
    """Smallest reward of a trajectory to imitate."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        limits = (self.max_versions_behind, self.max_rounds, self.max_uses)
        is_limited = any(limit is not None for limit in limits)
        if self.learner == "demonstrations" and (is_limited or self.order != "uniform"):
            raise ValueError(
                "learner demonstrations draws uniformly from all demonstrations: remove max_versions_behind, "
                "max_rounds, max_uses and order"
            )
        if self.learner == "actor_critic" and (is_limited or self.order not in ("uniform", "priority")):
            raise ValueError(
                "learner actor_critic draws turns from the whole buffer, uniformly or by priority: remove "
                "max_versions_behind, max_rounds, max_uses and another order, and bound the buffer by capacity"
            )
        if self.learner == "expert" and self.order == "priority":
            raise ValueError("order priority draws by advantages, and learner expert has none: set order uniform")
        if self.demonstrations is not None and self.learner != "actor_critic":
            raise ValueError(
                "demonstrations are drawn by learner actor_critic alone: set it, or imitate them before the training "
                "(warmup.experts.dataset), or alone (replay.experts.dataset, learner demonstrations)"
            )
        if (self.experts is not None) != (self.learner == "demonstrations"):
            raise ValueError(
                f"learner {self.learner} with experts {'set' if self.experts else 'not set'}: learner demonstrations "
                "imitates experts, and no other learner reads them. Set both, such as experts={episodes: 10}, or "
                "neither"
            )
        if self.learner == "policy_gradient" and self.updates and self.max_versions_behind is None:
            raise ValueError(
                "learner policy_gradient corrects for the policy that sampled a trajectory, which works for a few "
                "versions: set max_versions_behind, such as 4, or take learner imitation"
            )
        return self


class _Entry(Config, frozen=False):
    """One trajectory without its content."""

    number: int
    version: int
    """Oldest version that produced any of its tokens."""
    round: int
    """Number of the add() call that added the trajectory."""
    reward: float | None
    priority: float
    uses: int = 0
    place: FilePlace | None = None
    """Location on disk, if written."""


class _Index(Config, frozen=False):
    """State of a replay buffer without the contents."""

    next_number: int
    rounds: int
    draws: int
    seed: int
    evicted: int
    evicted_unused: int
    total_uses: int
    entries: tuple[_Entry, ...]
    """Trajectories of a file; empty in memory."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """A drawn trajectory."""

    number: int
    """Number of the trajectory in this buffer, in order of addition."""
    sample: Sample
    staleness: int
    """Difference between the current version and the oldest version that produced any of its tokens."""
    age: int
    """Calls of add() after the trajectory was added."""
    uses: int
    """Number of draws of the trajectory, including this one."""
    probability: float
    """Probability that the first draw of the call selects this trajectory, for importance weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayCounts:
    """Counts of a replay buffer."""

    size: int
    in_memory: int
    """Trajectories whose content is in memory."""
    total_uses: int
    """Number of draws so far, including draws of evicted trajectories."""
    max_uses: int
    """Largest number of uses among the stored trajectories."""
    evicted: int
    evicted_unused: int
    """Evicted trajectories that were never drawn."""


class Replay:
    """Trajectories of one run. Not thread-safe.

    The same calls draw the same trajectories, regardless of the memory limit and of a resume.
    """

    def __init__(self, config: ReplayConfig, folder: Path, *, seed: int) -> None:
        """folder: directory for contents that do not fit into memory; files of an earlier run are deleted."""
        self._config, self._files = config, ReplayFiles(folder)
        self._state = _Index(
            next_number=0, rounds=0, draws=0, seed=seed, evicted=0, evicted_unused=0, total_uses=0, entries=()
        )
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._samples: OrderedDict[int, Sample] = OrderedDict()
        """Contents in memory, the least recently used first."""
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, samples: Iterable[Sample], *, priorities: Sequence[float] | None = None) -> list[int]:
        """Adds finished samples. Returns their numbers. priorities: one each; if None, the highest in the buffer."""
        given = list(samples)
        highest = max((entry.priority for entry in self._entries.values()), default=1.0)
        weights = [highest] * len(given) if priorities is None else [float(priority) for priority in priorities]
        numbers = []
        self._state.rounds += 1
        for sample, priority in zip(given, weights, strict=True):
            _check_priority(priority)
            number = self._state.next_number
            self._state.next_number += 1
            versions = [value for value, _ in sample.versions.pieces]
            self._entries[number] = _Entry(
                number=number,
                version=min(versions, default=0),
                round=self._state.rounds,
                reward=sample.reward,
                priority=priority,
            )
            self._keep_in_memory(number, sample)
            numbers.append(number)
        while len(self._entries) > self._config.capacity:
            self._evict_entry(next(iter(self._entries)))
        self._spill_contents()
        return [number for number in numbers if number in self._entries]

    def draw(self, count: int, *, version: int, min_reward: float | None = None) -> list[Drawn]:
        """Draws up to `count` different eligible trajectories.

        version: current version of the weights. min_reward: if set, only trajectories of at least this reward are
        eligible, such as successes to imitate.
        """
        eligible = [entry for entry in self._entries.values() if self._is_eligible(entry, version, min_reward)]
        self._state.draws += 1
        weights = self._compute_weights(eligible)
        chosen = self._draw_indices(eligible, weights, count)
        drawn = [self._use_entry(eligible[place], version, float(weights[place])) for place in chosen]
        self._spill_contents()
        return drawn

    def set_priorities(self, priorities: Iterable[tuple[int, float]]) -> None:
        """Changes priorities by number; ignores trajectories that have been evicted."""
        for number, priority in priorities:
            _check_priority(priority)
            if number in self._entries:
                self._entries[number].priority = float(priority)

    def contents(self, known: Container[int] = ()) -> Iterator[tuple[int, Sample]]:
        """Yields (number, sample) of the stored trajectories that are not known, in order, without counting a use."""
        for number in [each for each in self._entries if each not in known]:
            yield number, self._read_content(self._entries[number])
            self._spill_contents()

    def uses(self) -> dict[int, int]:
        """Returns the number of draws of each stored trajectory, by number."""
        return {number: entry.uses for number, entry in self._entries.items()}

    def counts(self) -> ReplayCounts:
        return ReplayCounts(
            size=len(self._entries),
            in_memory=len(self._samples),
            total_uses=self._state.total_uses,
            max_uses=max(self.uses().values(), default=0),
            evicted=self._state.evicted,
            evicted_unused=self._state.evicted_unused,
        )

    def save(self, folder: Path) -> None:
        """Writes the buffer into a folder, such as a checkpoint's; full files are linked, not copied."""
        for number in self._samples:
            self._write_content(number)
        self._files.link_to(folder)
        index = self._state.model_copy(update={"entries": tuple(self._entries.values())})
        (folder / _INDEX).write_text(index.model_dump_json(), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Restores the state that save() wrote. Raises UserError if the folder contains none."""
        path = folder / _INDEX
        if not path.is_file():
            raise UserError(
                f"{folder} holds no replay: {_INDEX} is missing. Resume without replay, or from another one."
            )
        try:
            index = _Index.model_validate_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}. Delete {folder} to resume from the one before.") from None
        self._files.take_from(folder, [entry.place for entry in index.entries if entry.place])
        self._entries = OrderedDict((entry.number, entry) for entry in index.entries)
        self._samples.clear()
        self._sizes.clear()
        self._state = index.model_copy(update={"entries": ()})

    def _is_eligible(self, entry: _Entry, version: int, min_reward: float | None) -> bool:
        limits = self._config
        if limits.max_versions_behind is not None and version - entry.version > limits.max_versions_behind:
            return False
        if limits.max_rounds is not None and self._state.rounds - entry.round > limits.max_rounds:
            return False
        return min_reward is None or (entry.reward is not None and entry.reward >= min_reward)

    def _compute_weights(self, eligible: Sequence[_Entry]) -> FloatRow:
        """Returns the probabilities of the first draw, [number of eligible]."""
        if self._config.order == "priority":
            weights = np.array([entry.priority for entry in eligible]) ** self._config.priority_exponent
        else:
            weights = np.ones(len(eligible))
        total = weights.sum()
        return weights / total if total > 0 else np.full(len(eligible), 1 / max(1, len(eligible)))

    def _draw_indices(self, eligible: Sequence[_Entry], weights: FloatRow, count: int) -> list[int]:
        """Returns the indices of the drawn trajectories, without repetition."""
        places = range(len(eligible))
        if self._config.order == "newest":
            return list(reversed(places))[:count]
        if self._config.order == "oldest":
            return list(places)[:count]
        # The smallest of exponential variables with these rates are a draw without repetition (Efraimidis and Spirakis
        # 2006).
        random = np.random.default_rng(stable_hash("replay", self._state.seed, self._state.draws))
        with np.errstate(divide="ignore"):
            times = random.exponential(size=len(eligible)) / weights
        return [int(place) for place in np.argsort(times, kind="stable")[:count]]

    def _use_entry(self, entry: _Entry, version: int, probability: float) -> Drawn:
        sample = self._read_content(entry)
        entry.uses += 1
        self._state.total_uses += 1
        if self._config.max_uses is not None and entry.uses >= self._config.max_uses:
            self._evict_entry(entry.number)
        return Drawn(
            number=entry.number,
            sample=sample,
            staleness=version - entry.version,
            age=self._state.rounds - entry.round,
            uses=entry.uses,
            probability=probability,
        )

    def _read_content(self, entry: _Entry) -> Sample:
        if entry.number in self._samples:
            self._samples.move_to_end(entry.number)
            return self._samples[entry.number]
        assert entry.place is not None  # contents that are not in memory have been written
        sample = sample_from_bytes(self._files.read(entry.place))
        self._keep_in_memory(entry.number, sample)
        return sample

    def _keep_in_memory(self, number: int, sample: Sample) -> None:
        self._samples[number] = sample
        self._sizes[number] = sample_nbytes(sample)

    def _spill_contents(self) -> None:
        """Writes contents to disk and removes them from memory, the least recently used first, until the rest fits."""
        bound = self._config.in_memory_mib * (1 << 20)
        held = sum(self._sizes.values())
        while held > bound and self._samples:
            number = next(iter(self._samples))
            self._write_content(number)
            del self._samples[number]
            held -= self._sizes.pop(number)

    def _write_content(self, number: int) -> None:
        entry = self._entries[number]
        if entry.place is None:
            entry.place = self._files.write(sample_to_bytes(self._samples[number]))

    def _evict_entry(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._samples.pop(number, None)
        self._sizes.pop(number, None)
        self._state.evicted += 1
        self._state.evicted_unused += not entry.uses
        if entry.place:
            self._files.release(entry.place)


def _check_priority(priority: float) -> None:
    if not 0 <= priority < float("inf"):
        raise UserError(f"a priority of {priority}: it must be a number from 0 on")
