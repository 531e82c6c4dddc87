"""A user steers the live page with the keyboard or the mouse, and a screen reader reads it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from interlace.observe.run_folder import RunFolder
from interlace.observe.watch import server as server_module
from interlace.observe.watch.server import WatchServer
from tests.support.browser import Tab, needs_browser, open_tab
from tests.unit.observe.report.test_page import NUM_STEPS, make_run

pytest.importorskip("aiohttp")
pytestmark = needs_browser
PLOT = "document.querySelector('[data-chart=panel-0] .plot')"
SPOKEN = "document.querySelector('[data-chart=panel-0] output').textContent"
LEGEND = (
    "[...document.querySelectorAll('[data-chart=panel-0] .u-value')].map((one) => one.textContent).join(' ').trim()"
)
TICKS = "document.querySelector('[data-chart=panel-0] canvas').toDataURL()"
"""The picture of the chart: it changes with the range."""
LOG = "document.querySelector('[data-chart=panel-0] [data-log]')"


@asynccontextmanager
async def live_page(root: Path) -> AsyncIterator[tuple[Tab, RunFolder]]:
    folder = make_run(root, "run")
    server = WatchServer([folder])
    try:
        async with open_tab(await server.start(), root / "profile") as tab:
            yield tab, folder
            assert not tab.errors
    finally:
        await server.close()


def test_the_keys_move_the_cursor_zoom_and_show_all(tmp_path: Path) -> None:
    async def check() -> None:
        async with live_page(tmp_path) as (tab, _):
            await tab.evaluate(f"{PLOT}.focus()")
            whole = await tab.evaluate(TICKS)
            await tab.press("ArrowRight")
            await tab.press("ArrowRight")
            assert await tab.evaluate(SPOKEN) == "step 2: mean 0.2"
            assert str(await tab.evaluate(LEGEND)).split()[0] == "2"
            await tab.press("+")
            await tab.wait_for(f"{TICKS} !== {json.dumps(whole)}")
            await tab.press("0")
            await tab.wait_for(f"{TICKS} === {json.dumps(whole)}")
            await tab.press("Tab")
            await tab.press("Enter")
            assert await tab.evaluate(f"document.activeElement === {LOG}")
            assert await tab.evaluate(f"{LOG}.ariaPressed") == "true"

    asyncio.run(check())


def test_the_mouse_shows_values_and_zooms(tmp_path: Path) -> None:
    async def check() -> None:
        async with live_page(tmp_path) as (tab, _):
            await tab.evaluate(f"{PLOT}.scrollIntoView()")
            over = f"{PLOT}.querySelector('.u-over').getBoundingClientRect()"
            left, top, width = [float(await tab.evaluate(f"{over}.{side}")) for side in ("left", "top", "width")]
            assert (await tab.evaluate(LEGEND)).split()[0] == str(NUM_STEPS), "without a cursor: the last step"
            await tab.move_mouse(left + 1, top + 40)
            await tab.wait_for(f"{LEGEND}.startsWith('1 ')")
            whole = await tab.evaluate(TICKS)
            await tab.move_mouse(left + width / 2, top + 40)
            await tab.move_mouse(left + width / 2, top + 40, "mousePressed")
            await tab.move_mouse(left + width - 5, top + 40)
            await tab.move_mouse(left + width - 5, top + 40, "mouseReleased")
            await tab.wait_for(f"{TICKS} !== {json.dumps(whole)}")

    asyncio.run(check())


def test_bands_smoothing_and_dark_mode_redraw_the_charts(tmp_path: Path) -> None:
    async def check() -> None:
        async with live_page(tmp_path) as (tab, _):
            before = await tab.evaluate(TICKS)
            await tab.evaluate("document.getElementById('bands').click()")
            await tab.wait_for(f"{TICKS} !== {json.dumps(before)}")
            before = await tab.evaluate(TICKS)
            await tab.evaluate("document.getElementById('smoothing').focus()")
            await tab.press("ArrowRight")
            await tab.wait_for(f"{TICKS} !== {json.dumps(before)}")
            before = await tab.evaluate(TICKS)
            await tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
            await tab.wait_for(f"{TICKS} !== {json.dumps(before)}")

    asyncio.run(check())


def test_a_new_section_keeps_focus_and_log_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REST", 0.0)

    async def check() -> None:
        async with live_page(tmp_path) as (tab, folder):
            await tab.evaluate(f"{LOG}.click(), {LOG}.focus(), document.figure = {LOG}.closest('figure')")
            rows = folder.metrics.read_text().splitlines()
            changed = json.loads(rows[-1]) | {"step": NUM_STEPS + 1, "actor/clip_fraction": 0.5}
            with folder.metrics.open("a") as file:
                file.write(json.dumps(changed) + "\n")
            await tab.wait_for("!document.figure.isConnected && document.body.innerText.includes('Clip fraction')")
            assert await tab.evaluate(f"document.activeElement === {LOG}")
            assert await tab.evaluate(f"{LOG}.ariaPressed") == "true"

    asyncio.run(check())


def test_the_focus_stays_on_a_summary_whose_text_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REST", 0.0)
    summary = "document.querySelector('[data-key=metrics-run] summary')"

    async def check() -> None:
        async with live_page(tmp_path) as (tab, folder):
            await tab.evaluate(f"{summary}.focus(), document.summary = {summary}")
            before = await tab.evaluate(f"{summary}.textContent")
            row = json.loads(folder.metrics.read_text().splitlines()[-1])
            with folder.metrics.open("a") as file:
                file.write(json.dumps(row | {"step": NUM_STEPS + 1, "own/metric": 0.5}) + "\n")
            await tab.wait_for("!document.summary.isConnected")
            assert await tab.evaluate(f"document.activeElement === {summary}")
            assert await tab.evaluate(f"{summary}.textContent") != before

    asyncio.run(check())


def test_a_screen_reader_finds_names_for_all_controls(tmp_path: Path) -> None:
    async def check() -> None:
        async with live_page(tmp_path) as (tab, _):
            await tab.send("Accessibility.enable")
            nodes = (await tab.send("Accessibility.getFullAXTree"))["nodes"]
            shown = [
                (node["role"]["value"], node.get("name", {}).get("value", ""))
                for node in nodes  # type: ignore[attr-defined]
                if not node["ignored"]
            ]
            controls = ("button", "slider", "checkbox", "application", "region", "table", "DisclosureTriangle")
            assert not [role for role, name in shown if role in controls and not name]
            charts = [name for role, name in shown if role == "application"]
            assert len(charts) == await tab.evaluate("document.querySelectorAll('canvas').length") > 0
            levels = await tab.evaluate(
                "[...document.querySelectorAll('h1, h2, h3, h4')].filter((one) => one.checkVisibility())"
                ".map((one) => Number(one.tagName[1]))"
            )
            assert levels[0] == 1 and all(b - a <= 1 for a, b in pairwise(levels))

    asyncio.run(check())
