"""Videos of episodes: videos/step_*/ contains one .mp4 per episode, a contact sheet and an index of captions."""

import json
import re
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.observe.atomic_file import write_atomic

SHEET = "contact-sheet.png"
_INDEX = "films.json"
_COLUMNS = 8
_SEPARATION = 4
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Film:
    """Pictures of one episode, in order."""

    name: str
    """Name that stays the same from step to step: the task and the initial state."""
    caption: str
    """Outcome in words, such as `solved after 40 actions`."""
    frames: Sequence[NDArray[np.uint8]]
    """Pictures of equal size, [H, W, 3] each."""
    frames_per_s: float = 10.0
    label: str = ""
    """Reason why the episode was filmed, such as `worst`; empty for one without a choice by outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilmRecord:
    """A film on disk."""

    step: int
    caption: str
    name: str
    video: Path | None
    """Path of the .mp4 file; None if videos could not be written."""
    label: str = ""
    """Reason why the episode was filmed; see Film."""


def write_films(folder: Path, step: int, films: Sequence[Film]) -> str:
    """Writes the films of a step under a run's folder of videos.

    Returns the reason if no .mp4 files could be written, else an empty string; the contact sheet needs no library.
    Raises UserError if a film has no picture, or pictures of several sizes.
    """
    target = folder / f"step_{step:06d}"
    target.mkdir(parents=True, exist_ok=True)
    missing = ""
    records = []
    for number, film in enumerate(films):
        _check(film)
        path = target / f"{number:02d}-{_ODD.sub('-', f'{film.label} {film.name}'.strip())}.mp4"
        try:
            _write_video(path, film)
        except ImportError as error:
            missing = f"no videos, only contact sheets: {error}. Install them: pip install 'interlace[robots]'"
        video = "" if missing else path.name
        records.append({"name": film.name, "caption": film.caption, "label": film.label, "video": video})
    (target / SHEET).write_bytes(png(contact_sheet(films)))
    write_atomic(target / _INDEX, json.dumps(records, indent=1))
    return missing


def read_films(folder: Path) -> list[FilmRecord]:
    """Reads the index of the films in a run's folder of videos, by step."""
    found = []
    for path in sorted(folder.glob(f"step_*/{_INDEX}")):
        step = int(path.parent.name.removeprefix("step_"))
        for row in json.loads(path.read_text(encoding="utf-8")):
            video = path.parent / row["video"] if row["video"] else None
            label = row.get("label", "")
            found.append(FilmRecord(step=step, name=row["name"], caption=row["caption"], video=video, label=label))
    return found


def sheet_of(folder: Path, step: int) -> Path:
    """Returns the path of a step's contact sheet."""
    return folder / f"step_{step:06d}" / SHEET


def contact_sheet(films: Sequence[Film]) -> NDArray[np.uint8]:
    """Draws each film as a row of eight pictures, evenly spaced from its first to its last. Returns [H, W, 3]."""
    height = max(film.frames[0].shape[0] for film in films)
    width = max(film.frames[0].shape[1] for film in films)
    step_y, step_x = height + _SEPARATION, width + _SEPARATION
    sheet = np.full((step_y * len(films), step_x * _COLUMNS, 3), 255, np.uint8)
    for row, film in enumerate(films):
        places = np.linspace(0, len(film.frames) - 1, _COLUMNS).round().astype(int)
        for column, place in enumerate(places):
            frame = film.frames[place]
            y, x = row * step_y, column * step_x
            sheet[y : y + frame.shape[0], x : x + frame.shape[1]] = frame
    return sheet


def png(picture: NDArray[np.uint8]) -> bytes:
    """Encodes a picture, [H, W, 3], as a PNG file."""
    height, width, _ = picture.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_part(kind, content) for kind, content in parts)


def show_in_tensorboard(folder: Path, step: int, films: Sequence[Film]) -> None:
    """Adds the contact sheet to TensorBoard, in a subfolder of the run's; does nothing if it is not installed."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        return
    sheet = contact_sheet(films)
    image = Summary.Image(height=sheet.shape[0], width=sheet.shape[1], colorspace=3, encoded_image_string=png(sheet))
    writer = EventFileWriter(str(folder / "tensorboard" / "videos"))
    value = Summary.Value(tag="env/episodes", image=image)
    writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))
    writer.close()


def _png_part(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def _check(film: Film) -> None:
    sizes = {frame.shape for frame in film.frames}
    if len(sizes) != 1 or len(next(iter(sizes))) != 3:
        raise UserError(f"film {film.name!r} has pictures of {sorted(sizes)}: all of one size [H, W, 3], one at least")


def _write_video(path: Path, film: Film) -> None:
    from imageio_ffmpeg import write_frames

    height, width, _ = film.frames[0].shape
    # Players of H.264 need even sizes, and a macro block is 16 wide.
    writer = write_frames(
        str(path), (width, height), fps=film.frames_per_s, codec="libx264", macro_block_size=2, ffmpeg_log_level="error"
    )
    writer.send(None)
    for frame in film.frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()
