"""Videos of episodes are readable by other programs and shown in the report."""

import io
from pathlib import Path

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.observe.films import Film, contact_sheet, png, read_films, sheet_of, show_in_tensorboard, write_films
from interlace.observe.report.header import Entry
from interlace.observe.report.page import render_content
from interlace.observe.run_data import RunData


def film(name: str = "reach/7", num_frames: int = 12, size: int = 33) -> Film:
    frames = [np.full((size, size, 3), 20 * number, np.uint8) for number in range(num_frames)]
    return Film(name=name, caption="solved after 12 actions", frames=frames)


def test_a_png_is_read_by_others() -> None:
    image = pytest.importorskip("PIL.Image")
    picture = np.random.default_rng(0).integers(0, 255, (7, 5, 3)).astype(np.uint8)
    np.testing.assert_array_equal(np.asarray(image.open(io.BytesIO(png(picture)))), picture)


def test_a_contact_sheet_goes_from_the_first_picture_to_the_last() -> None:
    sheet = contact_sheet([film(num_frames=12, size=10), film(num_frames=1, size=10)])
    assert sheet.shape == (28, 112, 3)
    assert [int(sheet[0, 14 * column, 0]) for column in (0, 7)] == [0, 220]


def test_videos_are_written_and_shown(tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    for step in (0, 40):
        assert write_films(tmp_path / "videos", step, [film("reach/7"), film("reach/8", num_frames=3)]) == ""
    records = read_films(tmp_path / "videos")
    assert [(record.step, record.name) for record in records] == [(s, f"reach/{n}") for s in (0, 40) for n in (7, 8)]
    assert ffmpeg.count_frames_and_secs(str(records[0].video))[0] == 12
    assert sheet_of(tmp_path / "videos", 40).is_file()
    run = RunData(name="mine", folder=tmp_path, rows=[], transcripts=[])
    entry = Entry(run=run, timeline=None, config="")
    shown = render_content([entry], None).sections["episodes"]
    assert "before the first step" in shown and "after step 40" in shown
    assert shown.count("data:image/png;base64,") == 2 and shown.count("data:video/mp4;base64,") == 4
    (tmp_path / "videos" / "step_000000" / records[0].video.name).unlink()
    assert render_content([entry], None).sections["episodes"].count("<video") == 3


def test_without_ffmpeg_there_are_contact_sheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "imageio_ffmpeg", None)
    assert "pip install" in write_films(tmp_path, 0, [film()])
    assert read_films(tmp_path)[0].video is None and sheet_of(tmp_path, 0).is_file()


def test_tensorboard_gets_the_sheet(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    show_in_tensorboard(tmp_path, 3, [film(size=10)])
    events = loader.EventAccumulator(str(tmp_path / "tensorboard" / "videos"))
    events.Reload()
    (image,) = events.Images("env/episodes")
    assert (image.step, image.width, image.height) == (3, 112, 14)


def test_pictures_of_several_sizes_are_refused(tmp_path: Path) -> None:
    mixed = Film(name="odd", caption="", frames=[np.zeros((4, 4, 3), np.uint8), np.zeros((5, 4, 3), np.uint8)])
    with pytest.raises(UserError, match="all of one size"):
        write_films(tmp_path, 0, [mixed])
