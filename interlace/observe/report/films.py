"""Section of the report with a run's videos: the page contains the contact sheets, and small videos."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from itertools import groupby

from interlace.observe.films import FilmRecord, read_films, sheet_of
from interlace.observe.report.sections import Entry

_MAX_VIDEO_BYTES = 400_000
"""Largest video in the page; the page links to larger ones."""


def films(entries: Sequence[Entry]) -> str:
    """Shows the films of each step; empty if there are none."""
    return "".join(_run(entry) for entry in entries)


def _run(entry: Entry) -> str:
    folder = entry.run.folder / "videos"
    parts = []
    for step, records in groupby(read_films(folder), key=lambda record: record.step):
        sheet = b64encode(sheet_of(folder, step).read_bytes()).decode()
        rows = "".join(_row(entry, record) for record in records)
        title = "before the first step" if step == 0 else f"after step {step}"
        parts.append(
            f"<figure class='figure wide'><figcaption>{escape(entry.run.name)}, {title}</figcaption>"
            f"<img style='max-width:100%' alt='contact sheet' src='data:image/png;base64,{sheet}'>{rows}</figure>"
        )
    return "".join(parts)


def _row(entry: Entry, record: FilmRecord) -> str:
    text = escape(f"{record.name}: {record.caption}")
    if record.video is None or not record.video.is_file():
        return f"<p class='note'>{text}</p>"
    if record.video.stat().st_size > _MAX_VIDEO_BYTES:
        link = escape(record.video.relative_to(entry.run.folder).as_posix())
        return f"<p class='note'><a href='{link}'>{text}</a></p>"
    content = b64encode(record.video.read_bytes()).decode()
    return (
        f"<details><summary>{text}</summary><video controls loop muted style='max-width:100%' "
        f"src='data:video/mp4;base64,{content}'></video></details>"
    )
