"""Records the actions of a human, so that imitation and off-policy learning read them as demonstrations."""

import threading
from pathlib import Path

from interlace.robots.datasets.episodes import RecordedEpisode
from interlace.robots.datasets.lerobot_write import LeRobotWriter
from interlace.robots.serving.schema import Intervention


class InterventionRecorder:
    """Writes each intervention as one episode of a LeRobotDataset. The column `action.expert` marks its actions as
    demonstrated. The data set is complete after each episode.
    """

    def __init__(self, folder: Path, *, fps: float, robot_type: str | None = None) -> None:
        """Raises UserError if the folder contains files, or pyarrow is missing."""
        self._writer = LeRobotWriter(folder, fps=fps, robot_type=robot_type)
        self._lock = threading.Lock()
        self.num_episodes = self.num_steps = 0

    def add(self, given: Intervention) -> int:
        """Adds an intervention, and returns the number of episodes. May be called from several threads.

        Raises UserError if its columns differ from the first one's: all have rewards, ends and success, or none.
        """
        episode = RecordedEpisode(
            instruction=given.prompt,
            observations=given.observations,
            actions=given.actions,
            shown=given.actions,
            rewards=given.rewards,
            terminated=given.terminated,
            success=given.success,
        )
        with self._lock:
            self._writer.add(episode)
            self._writer.finish()
            self.num_episodes += 1
            self.num_steps += len(episode)
            return self.num_episodes
