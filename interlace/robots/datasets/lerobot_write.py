"""Writes recorded episodes as a LeRobotDataset, version 3.0."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.observe.films import png
from interlace.robots.datasets import layout
from interlace.robots.datasets.episodes import RecordedEpisode
from interlace.robots.datasets.layout import ColumnFeature, Info, PictureSums, VideoWriter, import_av
from interlace.robots.datasets.replace import check_replaceable, delete_content
from interlace.rollouts.envs.spec import Array


class LeRobotWriter:
    """Writes a new data set. finish() completes it; without this call it cannot be read. More episodes may follow, and
    another finish().
    """

    def __init__(
        self, folder: Path, *, fps: float, robot_type: str | None = None, video: bool = False, overwrite: bool = False
    ) -> None:
        """video: True to write pictures as videos (PyAV), else each as a PNG in the tables. overwrite: True to replace
        an earlier data set in the folder, which is deleted when the first episode is added.

        Raises UserError if the folder contains files that are not replaced, or pyarrow or PyAV is missing.
        """
        if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
            kind = "file" if folder.exists() else "symbolic link to a folder that does not exist"
            raise UserError(f"{folder} is a {kind}, and a data set is a folder. Name a new folder.")
        self._replaces = overwrite and folder.exists()
        """True until the content of the folder is deleted."""
        if self._replaces:
            check_replaceable(folder)
        elif folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty, and a data set is written whole. Name a new folder.")
        self._arrow = layout.import_pyarrow(folder)
        if video:
            import_av(folder)
        self._folder, self._fps, self._robot_type, self._uses_video = folder, fps, robot_type, video
        self._features: dict[str, ColumnFeature] = {}
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._columns: defaultdict[str, list[Array]] = defaultdict(list)
        """Numeric columns of all episodes, for statistics."""
        self._sums: defaultdict[str, list[PictureSums]] = defaultdict(list)
        """Sums of the pictures of each episode."""
        self._open: list[Any] = []
        """Tables of the data file that is being filled."""
        self._open_bytes = self._file = self._num_frames = 0
        self._videos: dict[str, tuple[VideoWriter, Path]] = {}
        self._video_files: defaultdict[str, int] = defaultdict(int)

    def add(self, episode: RecordedEpisode) -> None:
        """Adds an episode. Raises UserError if its columns differ from the first episode's."""
        columns, pictures = self._split_columns(episode)
        self._check_episode(columns, pictures)
        if self._replaces:
            delete_content(self._folder)
            self._replaces = False
        number, size = len(self._episodes), len(episode)
        task = self._tasks.setdefault(episode.instruction, len(self._tasks))
        columns |= {
            "timestamp": (np.arange(size) / self._fps).astype(np.float32),
            "frame_index": np.arange(size),
            "episode_index": np.full(size, number),
            "index": np.arange(self._num_frames, self._num_frames + size),
            "task_index": np.full(size, task),
        }
        row: dict[str, Any] = {"episode_index": number, "tasks": [episode.instruction], "length": size}
        row |= self._find_place("data", self._file)
        row |= {"dataset_from_index": self._num_frames, "dataset_to_index": self._num_frames + size}
        for name, values in columns.items():
            self._columns[name].append(values)
            row |= {f"stats/{name}/{key}": value for key, value in layout.statistics(values).items()}
        for name, values in pictures.items():
            self._sums[name].append(layout.picture_sums(values))
            found = layout.picture_statistics(self._sums[name][-1:])
            row |= {f"stats/{name}/{key}": value for key, value in found.items()}
        for name, values in pictures.items() if self._uses_video else ():
            row |= self._add_video(name, values)
        self._num_frames += size
        self._episodes.append(row)
        self._open.append(self._make_table(columns, {} if self._uses_video else pictures))
        self._open_bytes += self._open[-1].nbytes
        if self._open_bytes >= layout.DATA_MIB << 20:
            self._write_data()

    def finish(self) -> None:
        """Writes the rest of the data and the tables of the folder `meta`. Raises UserError without episodes."""
        if not self._episodes:
            raise UserError(f"{self._folder}: no episode was recorded.")
        self._write_data()
        for name in [*self._videos]:
            self._close_video(name)
        place = {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        rows = [row | place for row in self._episodes]
        self._write_table(self._arrow.Table.from_pylist(rows), layout.EPISODES.format(chunk_index=0, file_index=0))
        self._write_tasks()
        stats: dict[str, Any] = {
            name: layout.statistics(np.concatenate(parts)) for name, parts in self._columns.items()
        }
        stats |= {name: layout.picture_statistics(parts) for name, parts in self._sums.items()}
        (self._folder / layout.STATS).write_text(json.dumps(stats, indent=4), encoding="utf-8")
        info = Info(
            codebase_version=layout.VERSION,
            robot_type=self._robot_type,
            total_episodes=len(self._episodes),
            total_frames=self._num_frames,
            total_tasks=len(self._tasks),
            fps=int(self._fps) if float(self._fps).is_integer() else self._fps,
            splits={"train": f"0:{len(self._episodes)}"},
            video_path=layout.VIDEO if self._video_files else None,
            features=self._features
            | {name: ColumnFeature(dtype=kind, shape=(1,)) for name, kind in layout.COUNTERS.items()},
        )
        (self._folder / layout.INFO).write_text(info.model_dump_json(indent=4), encoding="utf-8")

    def _split_columns(self, episode: RecordedEpisode) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the numeric columns of an episode, and its pictures."""
        columns: dict[str, Array] = {layout.ACTION: np.asarray(episode.actions, np.float32)}
        if episode.shown is not None:
            columns[layout.SHOWN] = np.asarray(episode.shown, np.float32)
        if episode.rewards is not None:
            columns[layout.REWARD] = np.asarray(episode.rewards, np.float32)
        if episode.terminated is not None:
            columns[layout.DONE] = np.asarray(episode.terminated, np.bool_)
        if episode.success is not None:
            last = np.arange(len(episode)) == len(episode) - 1
            columns[layout.SUCCESS] = last & episode.success
        pictures: dict[str, Array] = {}
        for name, array in episode.observations.items():
            is_picture = array.ndim == 4
            (pictures if is_picture else columns)[layout.column_of(name)] = array
        return columns, pictures

    def _check_episode(self, columns: dict[str, Array], pictures: dict[str, Array]) -> None:
        kind = "video" if self._uses_video else "image"
        found = {
            name: ColumnFeature(dtype=str(each.dtype), shape=each.shape[1:] or (1,)) for name, each in columns.items()
        }
        axes = ["height", "width", "channels"]
        found |= {name: ColumnFeature(dtype=kind, shape=each.shape[1:], names=axes) for name, each in pictures.items()}
        if not self._features:
            self._features = found
        if found != self._features:
            raise UserError(
                f"{self._folder}: episode {len(self._episodes)} has the columns {_format_shapes(found)}, and the first "
                f"one {_format_shapes(self._features)}. Record them into separate data sets."
            )

    def _make_table(self, columns: dict[str, Array], pictures: dict[str, Array]) -> Any:
        arrow = self._arrow
        found = {}
        for name, values in columns.items():
            flat = arrow.array(np.ascontiguousarray(values).reshape(-1))
            is_list = values.ndim > 1 and values.shape[1] > 1  # a feature of shape [1] is a column of numbers
            found[name] = arrow.FixedSizeListArray.from_arrays(flat, values.shape[1]) if is_list else flat
        for name, values in pictures.items():
            entries = [{"bytes": png(picture), "path": None} for picture in values.astype(np.uint8)]
            kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
            found[name] = arrow.array(entries, kind)
        return arrow.table(found)

    def _add_video(self, name: str, pictures: Array) -> dict[str, Any]:
        """Appends pictures to the open video of a camera. Returns their place."""
        if name in self._videos and self._videos[name][1].stat().st_size >= layout.VIDEO_MIB << 20:
            self._close_video(name)
        number = self._video_files[name]
        if name not in self._videos:
            places = self._find_chunk(number)
            path = self._folder / layout.VIDEO.format(video_key=name, **places)
            self._videos[name] = (VideoWriter(path, self._fps, (pictures.shape[1], pictures.shape[2])), path)
        video, _ = self._videos[name]
        begin = video.num_frames
        video.add(np.asarray(pictures, np.uint8))
        times = {"from_timestamp": begin / self._fps, "to_timestamp": video.num_frames / self._fps}
        return {f"videos/{name}/{key}": value for key, value in times.items()} | self._find_place(
            f"videos/{name}", number
        )

    def _close_video(self, name: str) -> None:
        """Completes the open video of a camera; later pictures go into another one."""
        self._videos.pop(name)[0].close()
        self._video_files[name] += 1

    def _write_data(self) -> None:
        if self._open:
            table = self._arrow.concat_tables(self._open)
            self._write_table(table, layout.DATA.format(**self._find_chunk(self._file)))
            self._open, self._open_bytes, self._file = [], 0, self._file + 1

    def _write_tasks(self) -> None:
        """Writes the tasks with the description of an index, so that pandas reads the task as the index."""
        arrow = self._arrow
        table = arrow.table({"task_index": arrow.array([*self._tasks.values()]), "task": arrow.array([*self._tasks])})
        columns = [
            {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
            {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"},
        ]
        described = {
            "index_columns": ["task"], "column_indexes": [], "columns": [each | {"metadata": None} for each in columns],
            "creator": {"library": "pyarrow", "version": arrow.__version__}, "pandas_version": "2.0.0",
        }  # fmt: skip
        self._write_table(table.replace_schema_metadata({"pandas": json.dumps(described)}), layout.TASKS)

    def _write_table(self, table: Any, path: str) -> None:
        from pyarrow import parquet

        whole = self._folder / path
        whole.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, whole, compression="snappy")

    @staticmethod
    def _find_chunk(number: int) -> dict[str, int]:
        return {
            "chunk_index": number // layout.FILES_PER_CHUNK,
            "file_index": number % layout.FILES_PER_CHUNK,
        }

    def _find_place(self, prefix: str, number: int) -> dict[str, int]:
        return {f"{prefix}/{key}": value for key, value in self._find_chunk(number).items()}


def _format_shapes(features: dict[str, ColumnFeature]) -> str:
    return ", ".join(f"{name} {list(each.shape)}" for name, each in sorted(features.items()))
