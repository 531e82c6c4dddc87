"""Layout of a LeRobotDataset, version 3.0: names of files and columns, features, statistics. Imports no torch.

Described at https://huggingface.co/docs/lerobot/lerobot-dataset-v3: frames of many episodes share a Parquet file, and
pictures of many episodes a video; a table of episodes has the place of each. Videos need PyAV (extra `video`).
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.types import JSON
from interlace.robots.datasets.episodes import STATE
from interlace.rollouts.envs.spec import Array

VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
FILES_PER_CHUNK, DATA_MIB, VIDEO_MIB = 1000, 100, 200
"""Files of a folder, and sizes at which a new file begins, in MiB."""
ACTION, SHOWN, REWARD, DONE, SUCCESS = "action", "action.expert", "next.reward", "next.done", "next.success"
TRUNCATED = "next.truncated"
"""Column of LeRobot's recordings, in which `next.done` is true at a time limit too."""
STATE_COLUMN, CAMERAS, SINGLE_CAMERA = "observation.state", "observation.images.", "observation.image"
COUNTERS = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64"}
COUNTERS |= {"task_index": "int64"}
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


class ColumnFeature(Config):
    """One column of a data set."""

    model_config = ConfigDict(extra="allow")
    dtype: str
    """Name of a numpy type, or `image` for embedded pictures, or `video`."""
    shape: tuple[int, ...]
    names: Any = None

    @property
    def is_picture(self) -> bool:
        """Returns whether the column has pictures."""
        return self.dtype in ("image", "video")


class Info(Config):
    """File meta/info.json."""

    model_config = ConfigDict(extra="allow")
    codebase_version: str
    robot_type: str | None = None
    total_episodes: int
    total_frames: int
    total_tasks: int
    chunks_size: int = FILES_PER_CHUNK
    data_files_size_in_mb: int = DATA_MIB
    video_files_size_in_mb: int = VIDEO_MIB
    fps: float = Field(gt=0)
    """Frames per second."""
    splits: dict[str, str] = Field(default_factory=dict)
    data_path: str = DATA
    video_path: str | None = None
    features: dict[str, ColumnFeature]


def import_pyarrow(folder: Path) -> Any:
    """Imports pyarrow with its Parquet reader. Raises UserError if it is missing."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise UserError(f"{folder} needs pyarrow: pip install 'interlace[parquet]'.") from error


def column_of(name: str) -> str:
    """Returns the column of an array of an observation."""
    return STATE_COLUMN if name == STATE else f"{CAMERAS}{name}"


def array_of(column: str) -> str | None:
    """Returns the name of the observation's array that a column has; None for a column without one.

    A data set with a single camera may name its column `observation.image`; its array is `image`.
    """
    if column == STATE_COLUMN:
        return STATE
    if column == SINGLE_CAMERA:
        return SINGLE_CAMERA.rpartition(".")[2]
    return column.removeprefix(CAMERAS) if column.startswith(CAMERAS) else None


def camera_columns(features: Mapping[str, ColumnFeature]) -> dict[str, str]:
    """Returns the columns with pictures, by the names of their arrays."""
    found: dict[str, str] = {}
    for column, feature in features.items():
        name = array_of(column) if feature.is_picture else None
        if name is not None and found.get(name) != column_of(name):  # `observation.images.image` goes first
            found[name] = column
    return found


def statistics(values: Array) -> dict[str, list[float]]:
    """Returns minimum, maximum, mean, standard deviation, count and quantiles of a column [T, ...], along T."""
    rows = np.asarray(values, np.float64).reshape(len(values), -1)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    found |= {name: np.quantile(rows, share, axis=0) for name, share in QUANTILES.items()}
    return {name: each.tolist() for name, each in found.items()} | {"count": [float(len(rows))]}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PictureSums:
    """Sums over the pixels of pictures, by channel [3]."""

    total: NDArray[np.float64]
    square: NDArray[np.float64]
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    num_pixels: int
    num_frames: int


def picture_statistics(parts: Sequence[PictureSums]) -> dict[str, JSON]:
    """Joins sums of pictures to statistics by channel, [3, 1, 1], of values between 0 and 1."""
    count = sum(part.num_pixels for part in parts)
    mean = np.sum([part.total for part in parts], axis=0) / count
    square = np.sum([part.square for part in parts], axis=0) / count
    found = {
        "min": np.min([part.lowest for part in parts], axis=0),
        "max": np.max([part.highest for part in parts], axis=0),
        "mean": mean,
        "std": np.sqrt(np.maximum(square - mean**2, 0)),
    }
    shaped: dict[str, JSON] = {name: (each / 255).reshape(3, 1, 1).tolist() for name, each in found.items()}
    return shaped | {"count": [sum(part.num_frames for part in parts)]}


def picture_sums(pictures: Array) -> PictureSums:
    """Returns sums by channel over pictures [T, H, W, 3]."""
    rows = np.asarray(pictures).reshape(-1, 3).astype(np.float64)
    return PictureSums(
        total=rows.sum(0),
        square=(rows**2).sum(0),
        lowest=rows.min(0),
        highest=rows.max(0),
        num_pixels=len(rows),
        num_frames=len(pictures),
    )


CODEC, QUALITY = "libx264", "18"
"""Encoder, and its constant rate factor: 0 is exact, 18 nearly invisible."""


def import_av(path: Path) -> Any:
    """Imports PyAV. Raises UserError if it is missing."""
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise UserError(f"{path} needs PyAV: pip install 'interlace[video]', or record without --video.") from error


def check_size(size: tuple[int, int]) -> None:
    """Raises UserError if a height or width is odd, which yuv420p does not encode."""
    if size[0] % 2 or size[1] % 2:
        raise UserError(f"a video needs pictures of even size, and these are {size[0]} x {size[1]}. Change image_size.")


class VideoWriter:
    """Encodes pictures of one size."""

    def __init__(self, path: Path, fps: float, size: tuple[int, int]) -> None:
        """size: height and width, in pixels. Raises the error of check_size()."""
        check_size(size)
        av = import_av(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._av, self._file, self.num_frames = av, av.open(str(path), "w"), 0
        self._stream = self._file.add_stream(CODEC, rate=Fraction(fps).limit_denominator(1001))
        self._stream.height, self._stream.width = size
        self._stream.pix_fmt, self._stream.options = "yuv420p", {"crf": QUALITY, "g": "2"}

    def add(self, pictures: Iterable[NDArray[np.uint8]]) -> None:
        """Adds pictures [H, W, 3]."""
        for picture in pictures:
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts = self.num_frames
            self._file.mux(self._stream.encode(frame))
            self.num_frames += 1

    def close(self) -> None:
        """Completes the file."""
        self._file.mux(self._stream.encode())
        self._file.close()


def read_video(path: Path, begin_s: float, num_frames: int, fps: float) -> NDArray[np.uint8]:
    """Decodes the pictures [T, H, W, 3] of one episode, and no others of the file.

    begin_s: time of the first picture, in seconds. Returns fewer or more than `num_frames` pictures if the video lacks
    frames or has another frame rate. Raises UserError for a missing or damaged file.
    """
    av = import_av(path)
    first_s = begin_s - 0.5 / fps
    try:
        with av.open(str(path)) as file:
            stream = file.streams.video[0]
            # The decoder starts at the nearest key frame before the first picture.
            file.seek((stream.start_time or 0) + max(0, int(first_s / stream.time_base)), stream=stream)
            frames = _frames_between(file.decode(stream), stream, first_s, first_s + num_frames / fps)
            found = [frame.to_ndarray(format="rgb24") for frame in frames]
    except (OSError, ValueError, IndexError, av.error.FFmpegError) as error:
        raise UserError(f"{path} is not a readable video ({error}). Copy the data set again.") from None
    return np.stack(found) if found else np.zeros((0, 0, 0, 3), np.uint8)


def _frames_between(frames: Iterable[Any], stream: Any, first_s: float, end_s: float) -> Iterator[Any]:
    """Yields the frames of a time span, and decodes none after it."""
    for frame in frames:
        time_s = float((frame.pts - (stream.start_time or 0)) * stream.time_base)
        if time_s >= end_s:
            return
        if time_s >= first_s:
            yield frame
