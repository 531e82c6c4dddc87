"""Takes the pictures of docs/watching.md: the live page of a run in a headless browser, at two widths.

    python docs/images/take.py RUN

It needs chromium or google-chrome, and the extra `serve`. Writes watch-WIDTH.png (the top of the page) and
lanes-WIDTH.png (the section with one lane per sample) next to this file.
"""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from interlace.observe.report.device_time import DeviceTimeline
from interlace.observe.report.header import read_entry
from interlace.observe.report.page import render_report
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder, run_folder
from interlace.observe.watch.server import WatchServer

WIDTHS = (1280, 520)
TOP, LANES = 1100, 1240
"""Heights of the pictures of the top and of the lanes, in pixels."""
ONLY_LANES = "#lanes{display:block!important} section{display:none} #connection{display:none}"


def main() -> None:
    """Takes all pictures."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no chromium and no google-chrome is installed")
    asyncio.run(_take(browser, run_folder(sys.argv[1]), Path(__file__).parent))


async def _take(browser: str, folder: RunFolder, into: Path) -> None:
    server = WatchServer([folder])
    url = await server.start()
    entry = read_entry(RunData.read(folder), folder, DeviceTimeline.read(folder.timeline))
    page = render_report([entry], None).replace("</style>", f"{ONLY_LANES}</style>", 1)
    with tempfile.TemporaryDirectory() as scratch:
        lanes = Path(scratch) / "lanes.html"
        lanes.write_text(page, encoding="utf-8")
        for width in WIDTHS:
            await _picture(browser, url, into / f"watch-{width}.png", width, TOP, scratch)
            await _picture(browser, lanes.as_uri(), into / f"lanes-{width}.png", width, LANES, scratch)
            for name in ("watch", "lanes"):
                _crop(into / f"{name}-{width}.png")
    await server.close()


async def _picture(browser: str, url: str, path: Path, width: int, height: int, scratch: str) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000"]
    flags += [f"--user-data-dir={scratch}/profile", f"--window-size={width},{height}", f"--screenshot={path}"]
    process = await asyncio.create_subprocess_exec(browser, *flags, url, stderr=asyncio.subprocess.DEVNULL)
    if await asyncio.wait_for(process.wait(), 120):
        sys.exit(f"{browser} failed")


def _crop(path: Path) -> None:
    """Removes empty rows at the end of a picture, and stores it with 128 colours."""
    image = Image.open(path).convert("RGB")
    pixels = np.asarray(image)
    filled = np.flatnonzero((pixels != pixels[-1:, :1]).any(axis=(1, 2)))
    whole = image.crop((0, 0, image.width, min(image.height, int(filled[-1]) + 20)))
    whole.quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()
