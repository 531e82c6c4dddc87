"""Reads and writes a LeRobotDataset with LeRobot's code, for tests/contract/test_lerobot_dataset.py to compare with.

    python tests/oracles/lerobot_dataset.py read FOLDER OUT.npz
    python tests/oracles/lerobot_dataset.py write FOLDER image|video

Runs in an environment with lerobot 0.6.1 (`make test-lerobot`; Python 3.12 or later), which cannot hold this package.
"""

import sys
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

FPS, SIZES, TASKS = 20, (5, 8), ("push", "open the drawer")


def read(folder: Path, out: Path) -> None:
    """Writes each column of all frames, and the statistics of the actions, as arrays."""
    found = LeRobotDataset(repo_id="local/ours", root=folder, video_backend="pyav")
    frames = [found[number] for number in range(len(found))]
    columns = {name: np.stack([np.asarray(frame[name]) for frame in frames]) for name in frames[0] if name != "task"}
    tasks = np.array([frame["task"] for frame in frames])
    stats = {f"stats/{name}": np.asarray(value) for name, value in found.meta.stats["action"].items()}
    counts = np.array([found.num_episodes, found.num_frames, found.fps])
    np.savez(out, **columns, **stats, tasks=tasks, counts=counts)


def write(folder: Path, kind: str) -> None:
    """Writes two episodes with a state, an action, a reward, and a camera whose column has no camera's name."""
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "observation.image": {"dtype": kind, "shape": (64, 64, 3), "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    made = LeRobotDataset.create(repo_id="local/theirs", fps=FPS, features=features, root=folder, use_videos=True)
    for number, (size, task) in enumerate(zip(SIZES, TASKS, strict=True)):
        for step in range(size):
            frame = {
                "observation.state": np.array([number, step, 0.5], np.float32),
                "observation.image": np.full((64, 64, 3), 20 * step + 5, np.uint8),
                "action": np.array([step / 10, -number], np.float32),
                "next.reward": np.array([step], np.float32),
                "next.done": np.array([step == size - 1]),
            }
            made.add_frame({**frame, "task": task})
        made.save_episode()
    if hasattr(made, "finalize"):
        made.finalize()


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        write(Path(sys.argv[2]), sys.argv[3])
