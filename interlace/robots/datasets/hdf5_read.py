"""Reads data sets in HDF5 files as recorded episodes: Minari's folders, and files of robomimic and LIBERO.

Layouts: https://minari.farama.org/content/dataset_standards and
https://robomimic.github.io/docs/datasets/overview.html. Needs h5py (extra `hdf5`); code in a file is not run.
"""

import importlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.robots.datasets import layout
from interlace.robots.datasets.episodes import STATE, EpisodeReader, RecordedEpisode
from interlace.rollouts.envs.spec import Array

MINARI_FILE, MINARI_METADATA = "data/main_data.hdf5", "data/metadata.json"
LIBERO_STATE = ("ee_pos", "ee_ori", "gripper_states")
"""Parts of the state of LIBERO's files, in the order of the family `libero` and of its published policies."""
LIBERO_CAMERAS = {"agentview_rgb": "image", "eye_in_hand_rgb": "wrist_image"}


class Hdf5Reader(EpisodeReader):
    """Episodes of one HDF5 file."""

    def __init__(self, path: Path) -> None:
        """path: of the HDF5 file. Raises UserError if h5py is missing, or the file has no episode or is damaged."""
        try:
            self._h5py: Any = importlib.import_module("h5py")
        except ImportError as error:
            raise UserError(f"{path} needs h5py: pip install 'interlace[hdf5]'.") from error
        self.path = path
        try:
            with self._h5py.File(path) as file:
                self._names = sorted(self._episodes(file), key=lambda name: int(name.rpartition("_")[2]))
                if not self._names:
                    raise UserError(f"{path} has no episode. Copy the data set again.")
                first = self._read(file, self._names[0])
                self._check_whole(file)
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"{path} is not a readable data set ({error}). Copy it again.") from None
        self._first = first

    def __len__(self) -> int:
        return len(self._names)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        first = self._first
        found = {layout.column_of(name): array.shape[1:] for name, array in first.observations.items()}
        found[layout.ACTION] = first.actions.shape[1:]
        given = {layout.REWARD: first.rewards, layout.DONE: first.terminated, layout.SUCCESS: first.success}
        return found | {column: (1,) for column, value in given.items() if value is not None}

    @property
    def cameras(self) -> Sequence[str]:
        return [name for name in self._first.observations if name != STATE]

    def _read_episodes(self, cameras: Sequence[str]) -> Iterator[RecordedEpisode]:
        with self._h5py.File(self.path) as file:
            for name in self._names:
                yield self._read(file, name, cameras)

    @abstractmethod
    def _episodes(self, file: Any) -> list[str]:
        """Returns the names of the episodes' groups, which end with a number."""

    @abstractmethod
    def _check_whole(self, file: Any) -> None:
        """Raises UserError if episodes or steps are missing."""

    @abstractmethod
    def _read(self, file: Any, name: str, cameras: Sequence[str] | None = None) -> RecordedEpisode:
        """Reads one episode, with the pictures of some cameras; None for all."""

    def _check_lengths(self, name: str, arrays: Mapping[str, Array], size: int) -> None:
        for key, array in arrays.items():
            if len(array) != size:
                raise UserError(
                    f"{self.path}: {name} has {size} actions, and {len(array)} entries of {key}: frames are missing. "
                    "Copy the data set again."
                )


class MinariReader(Hdf5Reader):
    """Data set of Minari 0.5: one observation more than actions, which is left out."""

    def __init__(self, folder: Path) -> None:
        """folder: of the data set, with the folder `data`. See Hdf5Reader."""
        path = folder / MINARI_METADATA
        try:
            self._metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not readable ({error}). Copy the data set again.") from None
        super().__init__(folder / MINARI_FILE)

    def _episodes(self, file: Any) -> list[str]:
        return [name for name in file if name.startswith("episode_")]

    def _check_whole(self, file: Any) -> None:
        found = len(self._names), sum(len(file[name]["rewards"]) for name in self._names)
        told = self._metadata.get("total_episodes"), self._metadata.get("total_steps")
        if found != told:
            raise UserError(
                f"{self.path} has {found[0]} episodes with {found[1]} steps, and {MINARI_METADATA} counts {told[0]} "
                f"and {told[1]}. Copy the data set again."
            )

    def _read(self, file: Any, name: str, cameras: Sequence[str] | None = None) -> RecordedEpisode:
        del cameras  # pictures are not read
        group = file[name]
        actions = _vectors(group["actions"], f"{self.path}: the actions of {name}")
        size = len(actions)
        state = _vectors(group["observations"], f"{self.path}: the observations of {name}")
        arrays = {key: np.asarray(group[key]) for key in ("rewards", "terminations", "truncations")}
        self._check_lengths(name, arrays | {"observations, without the last one,": state[:-1]}, size)
        info = group.get("infos", {})
        spec = json.loads(self._metadata.get("env_spec") or "{}")
        return RecordedEpisode(
            instruction=spec.get("id") or str(self._metadata.get("dataset_id", "")),
            observations={STATE: state[:-1]},
            actions=actions,
            rewards=arrays["rewards"].astype(np.float32),
            terminated=arrays["terminations"].astype(np.bool_),
            success=bool(np.asarray(info["success"]).any()) if "success" in info else None,
        )


class RobomimicReader(Hdf5Reader):
    """File of robomimic or LIBERO: groups `data/demo_N`."""

    def _episodes(self, file: Any) -> list[str]:
        return [name for name in file["data"] if name.startswith("demo_")]

    def _check_whole(self, file: Any) -> None:
        told = file["data"].attrs.get("total")
        found = sum(len(file["data"][name]["actions"]) for name in self._names)
        if told is not None and int(told) != found:
            raise UserError(
                f"{self.path} has {found} steps, and its attribute `total` counts {int(told)}: frames are missing. "
                "Copy the data set again."
            )

    def _read(self, file: Any, name: str, cameras: Sequence[str] | None = None) -> RecordedEpisode:
        data = file["data"]
        group, problem = data[name], json.loads(data.attrs.get("problem_info", "{}"))
        actions = _vectors(group["actions"], f"{self.path}: the actions of {name}")
        seen = {key: group["obs"][key] for key in sorted(group["obs"])} if "obs" in group else {}
        is_libero = all(key in seen for key in LIBERO_STATE)
        parts = LIBERO_STATE if is_libero else [key for key, each in seen.items() if each.ndim <= 2]
        observations: dict[str, Array] = {}
        if parts:
            vectors = {key: _vectors(seen[key], f"{self.path}: {key} of {name}") for key in parts}
            self._check_lengths(name, vectors, len(actions))
            observations[STATE] = np.concatenate([*vectors.values()], 1)
        pictures = {LIBERO_CAMERAS.get(key, key): each for key, each in seen.items() if each.ndim == 4}
        for camera, each in pictures.items():
            if cameras is None or camera in cameras:
                # LIBERO's renderer gives rows from the bottom up; its published policies read them rotated.
                observations[camera] = np.asarray(each)[:, ::-1, ::-1] if is_libero else np.asarray(each)
        arrays = {key: np.asarray(group[key]) for key in ("rewards", "dones") if key in group}
        self._check_lengths(name, arrays | observations, len(actions))
        rewards = arrays["rewards"].astype(np.float32) if "rewards" in arrays else None
        is_sparse = rewards is not None and bool(np.isin(rewards, (0, 1)).all())
        text = problem.get("language_instruction", "") or json.loads(data.attrs.get("env_args", "{}")).get(
            "env_name", ""
        )
        return RecordedEpisode(
            instruction="".join(text).strip('"'),
            observations=observations,
            actions=actions,
            rewards=rewards,
            terminated=arrays["dones"].astype(np.bool_) if "dones" in arrays else None,
            success=bool(rewards.any()) if rewards is not None and is_sparse else None,
        )


def _vectors(node: Any, what: str) -> FloatArray:
    """Reads numbers as [T, size] in float32; the parts of a dictionary are joined by the order of their names.

    Raises UserError for pictures and other arrays.
    """
    if hasattr(node, "keys"):
        return np.concatenate([_vectors(node[key], f"{what}, {key},") for key in sorted(node)], 1)
    array = np.asarray(node)
    if array.ndim > 2 or array.dtype.kind not in "fiub":
        raise UserError(
            f"{what} are arrays of shape {list(array.shape[1:])} and type {array.dtype}, and only vectors of numbers "
            "are read. Take a data set with states."
        )
    return array.astype(np.float32).reshape(len(array), -1)
