"""Data sets of Minari, robomimic and LIBERO are read; a damaged one is refused. Needs h5py, and minari for one test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.robots.datasets.episodes import chunk_steps
from interlace.robots.datasets.hdf5_read import RobomimicReader
from interlace.robots.datasets.load import content_of, open_dataset

h5py: Any = pytest.importorskip("h5py")
SIZES = (4, 6, 3)


def write_minari(folder: Path) -> Path:
    """Writes Minari's layout, with eleven episodes so that the order of names is not the order of numbers."""
    (folder / "data").mkdir(parents=True)
    sizes = [*SIZES, *[2] * 8]
    with h5py.File(folder / "data/main_data.hdf5", "w") as file:
        for number, size in enumerate(sizes):
            group = file.create_group(f"episode_{number}")
            seen = np.arange(3 * (size + 1), dtype=np.float64).reshape(-1, 3) + 100 * number
            group["observations/position"], group["observations/angle"] = seen[:, 1:], seen[:, 0]
            group["actions"] = np.full((size, 1), 0.5, np.float32)
            group["rewards"] = np.arange(size, dtype=np.float64)
            group["terminations"] = np.arange(size) == size - 1
            group["truncations"] = np.zeros(size, np.bool_)
            group["infos/success"] = np.arange(size + 1) == size
    told = {"total_episodes": len(sizes), "total_steps": sum(sizes), "env_spec": json.dumps({"id": "Pendulum-v1"})}
    (folder / "data/metadata.json").write_text(json.dumps(told))
    return folder


def write_robomimic(path: Path, *, libero: bool) -> Path:
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(SIZES)
        data.attrs["env_args"] = json.dumps({"env_name": "Lift"})
        if libero:
            data.attrs["problem_info"] = json.dumps({"language_instruction": "open the drawer"})
        for number, size in enumerate(SIZES):
            group = data.create_group(f"demo_{number}")
            group["actions"] = np.full((size, 7), number, np.float64)
            group["rewards"], group["dones"] = (
                (np.arange(size) == size - 1).astype(np.uint8),
                np.arange(size) == size - 1,
            )
            ramp = np.arange(size, dtype=np.float64)[:, None]
            names = ("ee_pos", "ee_ori", "gripper_states") if libero else ("robot0_eef_pos", "object")
            for place, name in enumerate(names):
                group[f"obs/{name}"] = ramp + 10 * place + np.arange(2 + place)
            picture = np.zeros((size, 4, 4, 3), np.uint8)
            picture[:, 0, 0] = 255
            group["obs/agentview_rgb" if libero else "obs/agentview_image"] = picture
    return path


def test_a_folder_of_minari_is_read(tmp_path: Path) -> None:
    reader = open_dataset(write_minari(tmp_path))
    episodes = [*reader.episodes()]
    assert [len(each) for each in episodes] == [*SIZES, *[2] * 8]
    assert [each.observations["state"][0].tolist() for each in episodes[9:]] == [[900, 901, 902], [1000, 1001, 1002]]
    first = episodes[0]
    assert first.instruction == "Pendulum-v1" and first.success and first.rewards is not None
    assert first.rewards.tolist() == [0, 1, 2, 3] and first.actions.shape == (4, 1)
    assert reader.shapes["observation.state"] == (3,) and reader.shapes["next.success"] == (1,)
    [steps] = chunk_steps(first, 1, lambda seen: seen["state"], lambda chunk: chunk[0])
    assert steps.is_terminal and len(steps.rewards) == 4
    assert content_of(tmp_path) and content_of(tmp_path / "absent") == ""


def test_minari_s_own_data_set_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round trip with the package."""
    minari, gymnasium = pytest.importorskip("minari"), pytest.importorskip("gymnasium")
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    draw = np.random.default_rng(0)
    buffers = [
        EpisodeBuffer(
            id=None, seed=None, options=None, observations=draw.normal(size=(size + 1, 3)).astype(np.float32),
            actions=draw.uniform(-2, 2, (size, 1)).astype(np.float32), rewards=[*draw.normal(size=size)],
            terminations=[False] * size, truncations=[*(np.arange(size) == size - 1)], infos={},
        )
        for size in SIZES
    ]  # fmt: skip
    minari.create_dataset_from_buffers(
        "pendulum/test-v0", buffer=buffers, env="Pendulum-v1", action_space=gymnasium.spaces.Box(-2, 2, (1,)),
        observation_space=gymnasium.spaces.Box(-100, 100, (3,)),
    )  # fmt: skip
    theirs = [*minari.load_dataset("pendulum/test-v0").iterate_episodes()]
    found = [*open_dataset(tmp_path / "pendulum/test-v0").episodes()]
    for ours, their in zip(found, theirs, strict=True):
        np.testing.assert_array_equal(ours.observations["state"], their.observations[:-1])
        np.testing.assert_array_equal(ours.actions, their.actions)
        np.testing.assert_allclose(ours.rewards, their.rewards, rtol=1e-6)
        assert ours.success is None and ours.terminated is not None and not ours.terminated.any()


@pytest.mark.parametrize("libero", [True, False])
def test_a_file_of_robomimic_or_libero_is_read(tmp_path: Path, libero: bool) -> None:
    reader = open_dataset(write_robomimic(tmp_path / "demo.hdf5", libero=libero))
    episodes = [*reader.episodes(cameras=None)]
    assert [len(each) for each in episodes] == [*SIZES]
    assert episodes[0].instruction == ("open the drawer" if libero else "Lift") and episodes[1].success
    state = episodes[1].observations["state"][2].tolist()
    assert state == ([2, 3, 12, 13, 14, 22, 23, 24, 25] if libero else [12, 13, 14, 2, 3])
    picture = episodes[2].observations["image" if libero else "agentview_image"][0]
    assert picture[-1 if libero else 0, -1 if libero else 0].tolist() == [255, 255, 255]
    assert set(next(reader.episodes()).observations) == {"state"}, "pictures are read on request"
    with pytest.raises(UserError, match="no camera 'front'"):
        list(reader.episodes(cameras=["front"]))


def change(path: Path, work: Callable[[Any], None]) -> None:
    with h5py.File(path, "a") as file:
        work(file)


def _shorten(file: Any) -> None:
    del file["data/demo_1/obs/object"]
    file["data/demo_1/obs/object"] = np.zeros((5, 3))


def test_a_damaged_file_is_refused_by_its_damage(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "demo.hdf5", libero=False)
    change(path, _shorten)
    with pytest.raises(UserError, match="demo_1 has 6 actions, and 5 entries of object: frames are missing"):
        list(open_dataset(path).episodes())
    change(path, lambda file: file.pop("data/demo_1"))
    with pytest.raises(UserError, match="7 steps, and its attribute `total` counts 13"):
        open_dataset(path)
    path.write_bytes(b"no HDF5")
    with pytest.raises(UserError, match="not a readable data set"):
        RobomimicReader(path)
    folder = write_minari(tmp_path / "minari")
    change(folder / "data/main_data.hdf5", lambda file: file.pop("episode_2"))
    with pytest.raises(UserError, match=r"10 episodes with 26 steps, and data/metadata\.json counts 11 and 29"):
        open_dataset(folder)
    with pytest.raises(UserError, match="not a LeRobotDataset"):
        open_dataset(tmp_path / "absent")


def test_pictures_of_minari_are_refused(tmp_path: Path) -> None:
    folder = write_minari(tmp_path)

    def replace(file: Any) -> None:
        del file["episode_0/observations"]
        file["episode_0/observations"] = np.zeros((5, 8, 8, 3), np.uint8)

    change(folder / "data/main_data.hdf5", replace)
    with pytest.raises(UserError, match="only vectors of numbers"):
        open_dataset(folder)
