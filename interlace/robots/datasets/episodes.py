"""Recorded episodes of robots: demonstrations, and data for off-policy learning. Imports no torch.

T = steps of an episode, A = numbers of an action.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from interlace.core.errors import UserError
from interlace.core.transitions import EpisodeSteps
from interlace.core.types import BoolArray, FloatArray
from interlace.rollouts.envs.spec import Array, Observation

STATE = "state"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedEpisode:
    """One episode, step by step."""

    instruction: str
    observations: Mapping[str, Array]
    """Name -> [T, ...] before each step: `state` is [T, D] float32, a camera [T, H, W, 3] uint8 and upright."""
    actions: FloatArray
    """[T, A] executed actions of the simulator."""
    shown: FloatArray | None = None
    """[T, A] actions to imitate, if they differ from the executed ones: an expert's actions without noise."""
    rewards: FloatArray | None = None
    """[T] rewards; None if they were not recorded."""
    terminated: BoolArray | None = None
    """[T] True at a step with which the task ended; None if it was not recorded."""
    success: bool | None = None
    """True if the task was solved; None if it was not recorded."""

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def imitated(self) -> FloatArray:
        """[T, A] actions to imitate."""
        return self.actions if self.shown is None else self.shown

    def observation(self, step: int) -> Observation:
        """Returns the arrays before a step."""
        return {name: array[step] for name, array in self.observations.items()}


class EpisodeReader(ABC):
    """Recorded episodes of one data set. Checks the data set when it is opened, and each episode when it is read."""

    path: Path

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of one step, by the names of a LeRobotDataset's columns."""

    @property
    @abstractmethod
    def cameras(self) -> Sequence[str]:
        """Names of all cameras."""

    def episodes(self, *, cameras: Sequence[str] | None = ()) -> Iterator[RecordedEpisode]:
        """Yields all episodes in order.

        cameras: names of the cameras whose pictures are read; None for all. Raises UserError for an unknown camera, and
        for an episode with missing frames, another frame rate, or a number that is not finite.
        """
        known = self.cameras
        wanted = known if cameras is None else cameras
        if unknown := [name for name in wanted if name not in known]:
            raise UserError(
                f"{self.path} has no camera {unknown[0]!r}; its cameras are {', '.join(known) or 'none'}. Take one of "
                "them, or a policy without pictures."
            )
        for number, episode in enumerate(self._read_episodes(wanted)):
            self._check_finite(number, episode)
            yield episode

    def _check_finite(self, number: int, episode: RecordedEpisode) -> None:
        given = {"actions": episode.actions, "expert's actions": episode.shown, "rewards": episode.rewards}
        for name, array in {**episode.observations, **given}.items():
            if array is None or array.dtype.kind != "f":
                continue
            is_finite = np.isfinite(array).reshape(len(array), -1).all(1)
            if not is_finite.all():
                raise UserError(
                    f"{self.path}: {name} of step {int(np.argmin(is_finite))} of episode {number} (both from 0) are "
                    "NaN or infinite, which no policy can learn from. Remove the episode, or record it again."
                )

    @abstractmethod
    def _read_episodes(self, cameras: Sequence[str]) -> Iterator[RecordedEpisode]:
        """Yields all episodes in order, with the pictures of some cameras."""


def with_reward(episode: RecordedEpisode, reward: str) -> RecordedEpisode:
    """Returns an episode with the rewards of a recipe: the recorded ones for `return`, else 1 at the end of a success.

    Raises UserError if success was not recorded.
    """
    if reward == "return":
        return episode
    if episode.success is None:
        raise UserError(
            "episode.reward=success, and the data set does not tell which episodes succeeded (next.success). Record it "
            "with `interlace record`, or set episode.reward=return."
        )
    rewards = np.zeros(len(episode), np.float32)
    rewards[-1] = float(episode.success)
    terminated = episode.terminated
    if episode.success and terminated is not None:  # as in the simulators, success ends the task, not the time limit
        terminated = terminated.copy()
        terminated[-1] = True
    return replace(episode, rewards=rewards, terminated=terminated)


def chunk_steps(
    episode: RecordedEpisode,
    chunk: int,
    read: Callable[[Observation], FloatArray],
    encode: Callable[[FloatArray], FloatArray],
    reward_scale: float = 1.0,
) -> list[EpisodeSteps]:
    """Converts an episode to the steps of a policy with chunks of actions: one result for each offset below `chunk`.

    read: returns a policy's state [F] of an observation. encode: returns the policy's numbers [C] of a chunk [K, A].
    The last chunk is filled with its last action, which is not executed. An episode that was cut off has no state after
    its last chunk, so that this chunk is left out. Raises UserError if rewards or ends were not recorded.
    """
    if episode.rewards is None or episode.terminated is None:
        raise UserError(
            "off-policy learning needs the reward of each step and the end of each task (next.reward, next.done), "
            "which the data set lacks. Record it with `interlace record`, or imitate it (warmup.experts.dataset)."
        )
    is_terminal, found = bool(episode.terminated[-1]), []
    states = np.stack([read(episode.observation(step)) for step in range(len(episode))])
    for offset in range(min(chunk, len(episode))):
        starts = list(range(offset, len(episode), chunk))
        if not is_terminal:
            starts = [start for start in starts if start + chunk < len(episode)]
        if not starts:
            continue
        chunks = [episode.actions[start : start + chunk] for start in starts]
        filled = [np.concatenate([each, np.repeat(each[-1:], chunk - len(each), 0)]) for each in chunks]
        after = len(episode) - 1 if is_terminal else starts[-1] + chunk
        found.append(
            EpisodeSteps(
                states=states[[*starts, after]],
                actions=np.stack([encode(each) for each in filled]),
                rewards=np.array(
                    [reward_scale * episode.rewards[start : start + chunk].sum() for start in starts], np.float32
                ),
                is_terminal=is_terminal,
            )
        )
    return found
