"""A LeRobotDataset is read as it was written; other libraries read it; a damaged one is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.robots.datasets import layout
from interlace.robots.datasets.episodes import RecordedEpisode, chunk_steps, with_reward
from interlace.robots.datasets.layout import VideoWriter, read_video
from interlace.robots.datasets.lerobot_read import LeRobotReader
from interlace.robots.datasets.lerobot_write import LeRobotWriter

parquet = pytest.importorskip("pyarrow.parquet")
FPS = 20


def episode(key: int, steps: int, *, task: str = "open the drawer", pictures: bool = True) -> RecordedEpisode:
    draw = np.random.default_rng(key)
    observations = {"state": draw.normal(size=(steps, 3)).astype(np.float32)}
    if pictures:
        grid = np.linspace(0, 200, 16)[None, :, None, None] + np.arange(steps)[:, None, None, None]
        observations["front"] = np.broadcast_to(grid, (steps, 16, 16, 3)).astype(np.uint8)
    return RecordedEpisode(
        instruction=task,
        observations=observations,
        actions=draw.uniform(-1, 1, (steps, 2)).astype(np.float32),
        shown=draw.uniform(-1, 1, (steps, 2)).astype(np.float32),
        rewards=draw.normal(size=steps).astype(np.float32),
        terminated=np.arange(steps) == steps - 1,
        success=bool(key % 2),
    )


def write(folder: Path, *, video: bool = False, pictures: bool = True) -> list[RecordedEpisode]:
    given = [episode(0, 4, pictures=pictures), episode(1, 7, task="push", pictures=pictures)]
    given.append(episode(2, 5, pictures=pictures))
    writer = LeRobotWriter(folder, fps=FPS, robot_type="arm", video=video)
    for each in given:
        writer.add(each)
    writer.finish()
    return given


def check_numbers(found: RecordedEpisode, given: RecordedEpisode) -> None:
    assert found.instruction == given.instruction and found.success == given.success
    for name in ("actions", "shown", "rewards", "terminated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(given, name))
    np.testing.assert_array_equal(found.observations["state"], given.observations["state"])


def test_episodes_come_back_bit_for_bit(tmp_path: Path) -> None:
    given = write(tmp_path)
    found = [*LeRobotReader(tmp_path).episodes(cameras=None)]
    assert len(found) == 3
    for ours, theirs in zip(found, given, strict=True):
        check_numbers(ours, theirs)
        np.testing.assert_array_equal(ours.observations["front"], theirs.observations["front"])
    assert set(next(LeRobotReader(tmp_path).episodes()).observations) == {"state"}, "pictures are read on request"


@pytest.mark.parametrize("name", ["actions", "shown", "rewards", "state"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, name: str) -> None:
    good, bad = episode(0, 4, pictures=False), episode(1, 7, pictures=False)
    array = bad.observations["state"] if name == "state" else getattr(bad, name)
    array[5] = np.nan if name == "rewards" else np.inf
    writer = LeRobotWriter(tmp_path, fps=FPS)
    writer.add(good)
    writer.add(bad)
    writer.finish()
    words = "expert's actions" if name == "shown" else name
    with pytest.raises(UserError, match=rf"{words} of step 5 of episode 1 \(both from 0\) are NaN or infinite"):
        list(LeRobotReader(tmp_path).episodes())


def test_files_have_the_documented_layout(tmp_path: Path) -> None:
    given = write(tmp_path)
    info = json.loads((tmp_path / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["total_episodes"], info["total_frames"]) == ("v3.0", 20, 3, 16)
    assert info["features"]["observation.state"] == {"dtype": "float32", "shape": [3], "names": None}
    assert info["features"]["observation.images.front"]["dtype"] == "image" and info["splits"] == {"train": "0:3"}
    table = parquet.read_table(tmp_path / "data/chunk-000/file-000.parquet")
    assert table["index"].to_pylist() == [*range(16)] and table["frame_index"].to_pylist()[4:8] == [0, 1, 2, 3]
    assert table["task_index"].to_pylist() == [0] * 4 + [1] * 7 + [0] * 5
    assert table["timestamp"].to_pylist()[5] == pytest.approx(1 / FPS)
    rows = parquet.read_table(tmp_path / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in rows] == [(0, 4), (4, 11), (11, 16)]
    assert rows[1]["tasks"] == ["push"] and rows[1]["length"] == 7 and rows[1]["data/file_index"] == 0
    stats = json.loads((tmp_path / "meta/stats.json").read_text())
    actions = np.concatenate([each.actions for each in given])
    np.testing.assert_allclose(stats["action"]["mean"], actions.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats["action"]["q99"], np.quantile(actions, 0.99, axis=0), rtol=1e-5)
    pictures = np.concatenate([each.observations["front"] for each in given]) / 255
    np.testing.assert_allclose(np.ravel(stats["observation.images.front"]["std"]), pictures.std((0, 1, 2)), rtol=1e-6)
    assert np.shape(stats["observation.images.front"]["mean"]) == (3, 1, 1)


def test_the_libraries_that_lerobot_uses_read_it(tmp_path: Path) -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    write(tmp_path)
    tasks = pandas.read_parquet(tmp_path / "meta/tasks.parquet")
    assert tasks.loc["push"].task_index == 1 and tasks.iloc[0].name == "open the drawer"
    columns = {
        "observation.state": datasets.Sequence(length=3, feature=datasets.Value("float32")),
        "action": datasets.Sequence(length=2, feature=datasets.Value("float32")),
        "action.expert": datasets.Sequence(length=2, feature=datasets.Value("float32")),
        "next.reward": datasets.Value("float32"),
        "next.done": datasets.Value("bool"),
        "next.success": datasets.Value("bool"),
        "timestamp": datasets.Value("float32"),
        **{f"{name}_index": datasets.Value("int64") for name in ("frame", "episode", "task")},
        "index": datasets.Value("int64"),
        "observation.images.front": datasets.Image(),
    }
    files = [str(tmp_path / "data/chunk-000/file-000.parquet")]
    found = datasets.Dataset.from_parquet(files, features=datasets.Features(columns), cache_dir=str(tmp_path / "cache"))
    assert len(found) == 16 and found[3]["observation.images.front"].size == (16, 16)


def test_a_data_set_with_a_link_is_not_replaced(tmp_path: Path) -> None:
    """Its other parts were deleted before the link was noticed."""
    write(tmp_path / "demos")
    for part in ("data", "meta"):
        whole = tmp_path / "demos" / part
        whole.rename(tmp_path / part)
        whole.symlink_to(tmp_path / part)
        with pytest.raises(UserError, match=f"demos/{part} is a symbolic link, so the data set is not overwritten"):
            LeRobotWriter(tmp_path / "demos", fps=FPS, overwrite=True)
        whole.unlink()
        (tmp_path / part).rename(whole)
    LeRobotWriter(tmp_path / "demos", fps=FPS, overwrite=True)
    (tmp_path / "demos/videos").write_text("a file")
    with pytest.raises(UserError, match=r"not a recorded data set \(it contains 'videos'\)"):
        LeRobotWriter(tmp_path / "demos", fps=FPS, overwrite=True)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(UserError, match="nowhere is a symbolic link to a folder that does not exist"):
        LeRobotWriter(tmp_path / "nowhere", fps=FPS)


def test_videos_come_back_nearly_equal(tmp_path: Path) -> None:
    pytest.importorskip("av")
    given = write(tmp_path, video=True)
    assert (tmp_path / "videos/observation.images.front/chunk-000/file-000.mp4").is_file()
    for ours, theirs in zip(LeRobotReader(tmp_path).episodes(cameras=["front"]), given, strict=True):
        check_numbers(ours, theirs)
        gap = ours.observations["front"].astype(int) - theirs.observations["front"]
        assert np.abs(gap).mean() <= 3 and np.abs(gap).max() <= 10


def test_episodes_may_follow_a_finished_video(tmp_path: Path) -> None:
    pytest.importorskip("av")
    writer, given = LeRobotWriter(tmp_path / "more", fps=10, video=True), [episode(key, 5) for key in range(3)]
    for each in given:
        writer.add(each)
        writer.finish()
    for found, each in zip(LeRobotReader(tmp_path / "more").episodes(cameras=None), given, strict=True):
        check_numbers(found, each)
        assert found.observations["front"].shape == each.observations["front"].shape


def test_a_video_is_decoded_for_one_episode_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av")
    write(tmp_path, video=True)
    path, decoded = tmp_path / "videos/observation.images.front/chunk-000/file-000.mp4", []
    whole = read_video(path, 0.0, 16, FPS)
    monkeypatch.setattr(layout, "np", _CountingStack(decoded))
    found = read_video(path, 11 / FPS, 5, FPS)
    assert decoded == [5] and len(whole) == 16
    np.testing.assert_array_equal(found, whole[11:])
    with av.open(str(path)) as file:
        assert file.streams.video[0].frames == 16
    assert len(read_video(path, 11 / FPS, 5, 2 * FPS)) == 3, "at another rate the number of pictures differs"


class _CountingStack:
    """numpy, with a count of the pictures of each stack."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def __getattr__(self, name: str) -> object:
        return getattr(np, name)

    def stack(self, pictures: list[np.ndarray]) -> np.ndarray:
        self._counts.append(len(pictures))
        return np.stack(pictures)


def test_a_video_with_missing_pictures_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("av")
    write(tmp_path, video=True)
    path = tmp_path / "videos/observation.images.front/chunk-000/file-000.mp4"
    short = VideoWriter(path, FPS, (16, 16))
    short.add(np.zeros((14, 16, 16, 3), np.uint8))
    short.close()
    with pytest.raises(UserError, match="3 pictures for the 5 frames of episode 2"):
        list(LeRobotReader(tmp_path).episodes(cameras=None))


def test_a_single_camera_may_have_no_name(tmp_path: Path) -> None:
    """Data sets with one camera, such as lerobot/pusht, name its column `observation.image`."""
    given = write(tmp_path)
    path, info = tmp_path / "data/chunk-000/file-000.parquet", tmp_path / "meta/info.json"
    table = parquet.read_table(path)
    names = [name.replace("images.front", "image") for name in table.column_names]
    parquet.write_table(table.rename_columns(names), path)
    info.write_text(info.read_text().replace("observation.images.front", "observation.image"))
    found = next(LeRobotReader(tmp_path).episodes(cameras=None))
    np.testing.assert_array_equal(found.observations["image"], given[0].observations["front"])


def test_a_time_limit_is_no_end_of_the_task(tmp_path: Path) -> None:
    """In LeRobot's recordings `next.done` is true at a time limit too, and `next.truncated` tells them apart."""
    write(tmp_path)
    path, info = tmp_path / "data/chunk-000/file-000.parquet", json.loads((tmp_path / "meta/info.json").read_text())
    table, is_last = parquet.read_table(path), np.isin(np.arange(16), (10, 15))
    is_success = np.arange(16) == 15  # the last episode succeeds at the limit
    table = table.set_column(table.column_names.index("next.success"), "next.success", [is_success])
    parquet.write_table(table.append_column("next.truncated", [is_last]), path)
    features = info["features"] | {"next.truncated": {"dtype": "bool", "shape": [1], "names": None}}
    _change_info(tmp_path, features=features)
    ends = [each.terminated for each in LeRobotReader(tmp_path).episodes()]
    assert [end is not None and bool(end[-1]) for end in ends] == [True, False, True]


def _change_info(folder: Path, **changes: object) -> None:
    path = folder / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _drop_a_frame(folder: Path) -> None:
    path = folder / "data/chunk-000/file-000.parquet"
    table = parquet.read_table(path)
    parquet.write_table(table.take([place for place in range(16) if place != 6]), path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: _change_info(folder, fps=30), "30 frames per second"),
        (_drop_a_frame, "episode 1 has 6 frames"),
        (lambda folder: _change_info(folder, total_frames=17), "counts 3 and 17"),
        (lambda folder: _change_info(folder, codebase_version="v2.1"), "version v2.1"),
        (lambda folder: (folder / "meta/info.json").unlink(), "not a LeRobotDataset"),
        (lambda folder: (folder / "data/chunk-000/file-000.parquet").write_bytes(b"x"), "not a readable Parquet"),
    ],
)
def test_a_damaged_data_set_is_refused_by_its_damage(tmp_path: Path, damage: Callable[[Path], None], told: str) -> None:
    write(tmp_path, pictures=False)
    damage(tmp_path)
    with pytest.raises(UserError, match=told):
        list(LeRobotReader(tmp_path).episodes())


def test_an_unknown_camera_and_a_full_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match="no camera 'wrist'"):
        list(LeRobotReader(tmp_path).episodes(cameras=["wrist"]))
    with pytest.raises(UserError, match="not empty"):
        LeRobotWriter(tmp_path, fps=FPS)
    writer = LeRobotWriter(tmp_path / "new", fps=FPS)
    writer.add(episode(0, 3))
    with pytest.raises(UserError, match="separate data sets"):
        writer.add(episode(0, 3, pictures=False))


def test_chunks_of_a_finished_and_of_a_cut_off_episode() -> None:
    given = episode(1, 5, pictures=False)
    arguments = (2, lambda seen: seen["state"], lambda chunk: chunk.reshape(-1))
    even, odd = chunk_steps(given, *arguments)
    np.testing.assert_allclose(even.states[:3], given.observations["state"][[0, 2, 4]])
    np.testing.assert_allclose(even.rewards, [given.rewards[:2].sum(), given.rewards[2:4].sum(), given.rewards[4]])
    np.testing.assert_allclose(even.actions[2], np.tile(given.actions[4], 2), err_msg="filled with the last action")
    assert even.is_terminal and odd.actions.shape == (2, 4)
    cut = replace(given, terminated=np.zeros(5, np.bool_))
    even, odd = chunk_steps(cut, *arguments)
    assert not even.is_terminal and len(even.rewards) == 2 and even.states.shape == (3, 3)
    np.testing.assert_allclose(even.states[2], given.observations["state"][4])
    assert len(odd.rewards) == 1
    assert with_reward(given, "success").rewards.tolist() == [0, 0, 0, 0, 1]
    even, _ = chunk_steps(with_reward(cut, "success"), *arguments)
    assert even.is_terminal and even.rewards[-1] == 1, "success ends the task, as in the simulators"
    with pytest.raises(UserError, match="next\\.reward"):
        chunk_steps(replace(given, rewards=None), *arguments)
