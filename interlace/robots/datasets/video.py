"""Videos of a data set: pictures of many episodes, one after the other, in an mp4 file. Needs PyAV (extra `video`)."""

import importlib
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError

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
