"""Reads a LeRobotDataset, version 3.0, as recorded episodes."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.robots.datasets import layout
from interlace.robots.datasets.episodes import EpisodeReader, RecordedEpisode
from interlace.robots.datasets.layout import Info, read_video
from interlace.rollouts.envs.spec import Array

TOLERANCE_S = 1e-3
"""Largest difference of a frame's time from its number divided by the frame rate."""


class LeRobotReader(EpisodeReader):
    """Episodes of a LeRobotDataset."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if files are missing, of another version, or contradict each other."""
        self.path = folder
        layout.import_pyarrow(folder)
        self.info = _read_info(folder)
        self._tasks = self._read_tasks()
        rows = [row for path in sorted(folder.glob("meta/episodes/*/*.parquet")) for row in self._read_rows(path)]
        self._episodes = sorted(rows, key=lambda row: int(row["episode_index"]))
        self._check_counts()
        self._load = lru_cache(maxsize=2)(self._read_table)

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: feature.shape for name, feature in self.info.features.items()}

    @property
    def cameras(self) -> Sequence[str]:
        return [*layout.camera_columns(self.info.features)]

    def _read_episodes(self, cameras: Sequence[str]) -> Iterator[RecordedEpisode]:
        columns = layout.camera_columns(self.info.features)
        for row in self._episodes:
            yield self._read_episode(row, {name: columns[name] for name in cameras})

    def _read_episode(self, row: Mapping[str, Any], cameras: Mapping[str, str]) -> RecordedEpisode:
        """Reads an episode. cameras: columns of pictures, by the name of the camera."""
        number, size = int(row["episode_index"]), int(row["length"])
        path = self._format_path(self.info.data_path, row, "data")
        table = self._load(path)
        places = np.flatnonzero(table["episode_index"].to_numpy() == number)
        part = table.take(places)
        self._check_frames(path, number, size, part)
        columns = {name: _read_numbers(part[name]) for name in part.column_names if self._is_numeric(name)}
        observations = {
            name: values.reshape(len(values), -1)
            for column, values in columns.items()
            if (name := layout.array_of(column)) is not None
        }
        for camera, column in cameras.items():
            observations[camera] = self._read_pictures(column, row, part)
        if layout.ACTION not in columns:
            raise UserError(f"{path} has no column {layout.ACTION!r}, which a demonstration needs.")
        done, success = columns.get(layout.DONE), columns.get(layout.SUCCESS)
        if done is not None:
            cut = np.asarray(columns.get(layout.TRUNCATED, False), np.bool_)
            if success is not None:  # a success in the last step before the limit ends the task
                cut = cut & ~np.asarray(success, np.bool_)
            done = np.asarray(done, np.bool_) & ~cut
        task = self._tasks.get(int(columns["task_index"][0]), "") if "task_index" in columns else ""
        return RecordedEpisode(
            instruction=task or next(iter(row.get("tasks") or ()), ""),
            observations=observations,
            actions=_rows_of(columns[layout.ACTION]),
            shown=_rows_of(columns[layout.SHOWN]) if layout.SHOWN in columns else None,
            rewards=np.asarray(columns[layout.REWARD], np.float32) if layout.REWARD in columns else None,
            terminated=done,
            success=None if success is None else bool(success.any()),
        )

    def _read_pictures(self, column: str, row: Mapping[str, Any], part: Any) -> Array:
        """Returns the pictures [T, H, W, 3] of an episode."""
        if self.info.features[column].dtype == "image":
            from PIL import Image

            return np.stack(
                [np.asarray(Image.open(io.BytesIO(each["bytes"])).convert("RGB")) for each in part[column].to_pylist()]
            )
        if self.info.video_path is None:
            raise UserError(f"{self.path}: {column} is a video, and meta/info.json has no video_path.")
        path = self._format_path(self.info.video_path, row, f"videos/{column}", video_key=column)
        found = read_video(path, float(row[f"videos/{column}/from_timestamp"]), len(part), self.info.fps)
        if len(found) != len(part):
            raise UserError(
                f"{path} has {len(found)} pictures for the {len(part)} frames of episode {row['episode_index']}: "
                "frames are missing, or the video has another frame rate. Copy the data set again."
            )
        return found

    def _check_frames(self, path: Path, number: int, size: int, part: Any) -> None:
        frames, times = part["frame_index"].to_numpy(), part["timestamp"].to_numpy()
        if len(frames) != size or not np.array_equal(frames, np.arange(size)):
            raise UserError(
                f"{path}: episode {number} has {len(frames)} frames, and the table of episodes says {size}: frames are "
                "missing. Copy the data set again."
            )
        gap = float(np.abs(times - frames / self.info.fps).max())
        if gap > TOLERANCE_S:
            raise UserError(
                f"{path}: the times of episode {number} differ by {gap:.3f} s from {self.info.fps:g} frames per "
                "second, the rate in meta/info.json. Correct fps there, or resample the data set."
            )

    def _check_counts(self) -> None:
        frames = sum(int(row["length"]) for row in self._episodes)
        told = (self.info.total_episodes, self.info.total_frames)
        if (len(self._episodes), frames) != told:
            raise UserError(
                f"{self.path} has {len(self._episodes)} episodes with {frames} frames in its table of episodes, and "
                f"meta/info.json counts {told[0]} and {told[1]}. Copy the data set again."
            )

    def _is_numeric(self, column: str) -> bool:
        feature = self.info.features.get(column)
        return feature is not None and not feature.is_picture and feature.dtype != "string" and len(feature.shape) < 2

    def _read_tasks(self) -> dict[int, str]:
        """Returns the instructions by index. The column of the instruction has the name of an index, which differs."""
        path = self.path / layout.TASKS
        rows = self._read_rows(path) if path.is_file() else []
        return {int(row["task_index"]): next(value for value in row.values() if isinstance(value, str)) for row in rows}

    def _format_path(self, pattern: str, row: Mapping[str, Any], prefix: str, **names: str) -> Path:
        places = {key: int(row[f"{prefix}/{key}"]) for key in ("chunk_index", "file_index")}
        return self.path / pattern.format(**places, **names)

    def _read_rows(self, path: Path) -> list[dict[str, Any]]:
        table = self._read_table(path)
        kept = [name for name in table.column_names if not name.startswith("stats/")]
        found: list[dict[str, Any]] = table.select(kept).to_pylist()
        return found

    def _read_table(self, path: Path) -> Any:
        import pyarrow
        from pyarrow import parquet

        try:
            return parquet.read_table(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{path} is not a readable Parquet file ({error}). Copy the data set again.") from None


def _read_info(folder: Path) -> Info:
    path = folder / layout.INFO
    if not path.is_file():
        raise UserError(
            f"{folder} is not a LeRobotDataset: {layout.INFO} is missing. Name the folder that contains it."
        )
    try:
        info = Info.parse(json.loads(path.read_text(encoding="utf-8")), where=str(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}.") from None
    if not info.codebase_version.startswith("v3."):
        raise UserError(
            f"{folder} has version {info.codebase_version} of LeRobot's layout, and v3 is read. Convert it with "
            "LeRobot: python -m lerobot.scripts.convert_dataset_v21_to_v30."
        )
    return info


def _read_numbers(column: Any) -> Array:
    """Returns a column of numbers or of lists of numbers as an array, [T] or [T, numbers]."""
    whole = column.combine_chunks()
    if hasattr(whole.type, "value_type"):
        flat = whole.flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat).reshape(len(whole), -1)
    return np.asarray(whole.to_numpy(zero_copy_only=False))


def _rows_of(actions: Array) -> Any:
    """Returns actions [T, A] in float32; a column of single numbers has A = 1."""
    return np.asarray(actions, np.float32).reshape(len(actions), -1)
