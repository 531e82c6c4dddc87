"""Videos of a run on a page: contact sheets within the page, and the videos too if they are small."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from interlace.observe.films import FilmRecord, read_films, sheet_of
from interlace.observe.run_data import RunData

_MAX_VIDEO_BYTES = 400_000
"""The page links to the file of a larger video."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoView:
    """A filmed episode."""

    text: str
    content: str = ""
    """Base64 of the video; empty if the page does not contain it."""
    link: str = ""
    """Path within the folder of the run; empty without a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilmView:
    """The filmed episodes of one step."""

    title: str
    sheet: str
    """Base64 of the contact sheet, a PNG."""
    videos: Sequence[VideoView]


def film_views(run: RunData) -> list[FilmView]:
    """Reads the filmed episodes of a run by step; empty if none was filmed."""
    folder = run.folder / "videos"
    found = []
    for step, records in groupby(read_films(folder), key=lambda record: record.step):
        sheet = b64encode(sheet_of(folder, step).read_bytes()).decode()
        title = "before the first step" if step == 0 else f"after step {step}"
        videos = [_make_video_view(run, record) for record in records]
        found.append(FilmView(title=f"{run.name}, {title}", sheet=sheet, videos=videos))
    return found


def _make_video_view(run: RunData, record: FilmRecord) -> VideoView:
    text = f"{record.label}: " * bool(record.label) + f"{record.name}: {record.caption}"
    if record.video is None or not record.video.is_file():
        return VideoView(text=text)
    if record.video.stat().st_size > _MAX_VIDEO_BYTES:
        return VideoView(text=text, link=record.video.relative_to(run.folder).as_posix())
    return VideoView(text=text, content=b64encode(record.video.read_bytes()).decode())
