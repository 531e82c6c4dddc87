"""A reader chooses the step of the devices and lanes in the browser, on a live page and in a report."""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.observe.report.page import write_report
from interlace.observe.run_folder import RunFolder
from interlace.observe.watch import server as server_module
from interlace.observe.watch.server import ContentSource, WatchServer
from tests.support.browser import Tab, needs_browser, open_tab
from tests.unit.observe.report.test_page import NUM_STEPS, WIDTHS, make_run

aiohttp = pytest.importorskip("aiohttp")
MENU = "document.querySelector('#timeline select')"
CAPTIONS = "[...document.querySelectorAll('#timeline figcaption, #lanes figcaption')].map((one) => one.firstChild.data)"


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REST", 0.0)


def captions_of(*steps: int) -> str:
    """Returns a condition: both sections show these steps, run by run."""
    shown = [f"run, step {step}" for _ in range(2) for step in steps]
    return f"JSON.stringify({CAPTIONS}) === {json.dumps(json.dumps(shown, separators=(',', ':')))}"


def cut_last_step(folder: RunFolder) -> list[str]:
    """Removes the end of the trace, from the end of the last step on; returns the removed lines."""
    lines = folder.timeline.read_text().splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if f'"name":"step {NUM_STEPS}"' in line)
    folder.timeline.write_text("".join(lines[:at]))
    return lines[at:]


async def choose_by_keys(tab: Tab) -> None:
    """Chooses the next entries of the menu by the keyboard alone: slowest, first, last, and then the numbers."""
    await tab.evaluate(f"{MENU}.focus()")
    assert await tab.evaluate(f"{MENU}.value") == "middle"
    await tab.wait_for(captions_of(4))
    for step in (1, 1, NUM_STEPS, 1, 2):
        await tab.press("ArrowDown")
        await tab.wait_for(captions_of(step))
        assert await tab.evaluate(f"document.activeElement === {MENU}")
    assert await tab.evaluate("document.querySelector('#lanes select').value") == "2"
    assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    assert not tab.errors


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_keys_choose_the_step_of_a_live_page(tmp_path: Path, width: int) -> None:
    async def check() -> None:
        server = WatchServer([make_run(tmp_path, "run")])
        try:
            async with open_tab(await server.start(), tmp_path / "profile", width=width) as tab:
                await choose_by_keys(tab)
        finally:
            await server.close()

    asyncio.run(check())


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_keys_choose_the_step_of_a_report(tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    write_report([make_run(tmp_path, "run")], page)

    async def check() -> None:
        async with open_tab(page.as_uri(), tmp_path / "profile", width=width) as tab:
            await choose_by_keys(tab)
            await tab.evaluate(f"({MENU}.value = 'middle', {MENU}.onchange())")
            await tab.wait_for(captions_of(4))

    asyncio.run(check())


@needs_browser
def test_the_last_step_follows_a_growing_run_and_the_open_menu_stays(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    rest = cut_last_step(folder)

    async def check() -> None:
        server = WatchServer([folder])
        try:
            async with open_tab(await server.start(), tmp_path / "profile") as tab:
                await tab.evaluate(
                    f"(document.menu = {MENU}, {MENU}.focus(), {MENU}.value = 'last', {MENU}.onchange())"
                )
                await tab.wait_for(captions_of(NUM_STEPS - 1))
                with folder.timeline.open("a") as file:
                    file.writelines(rest)
                await tab.wait_for(captions_of(NUM_STEPS))
                assert await tab.evaluate(f"document.menu.isConnected && document.activeElement === {MENU}")
                assert await tab.evaluate(f"{MENU}.options.length") == 4 + NUM_STEPS
                assert not tab.errors
        finally:
            await server.close()

    asyncio.run(check())


@needs_browser
def test_each_step_of_a_crashed_run_can_be_chosen(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder.process.write_text(json.dumps({"pid": ended.pid, "host": socket.gethostname()}))
    cut_last_step(folder)
    with folder.timeline.open("a") as file:
        file.write('{"name": "rollout.serve", "ph": "X", "pid": 2')

    async def check() -> None:
        server = WatchServer([folder])
        try:
            async with open_tab(await server.start(), tmp_path / "profile") as tab:
                await tab.wait_for("document.body.innerText.includes('ended unexpectedly')")
                await tab.evaluate(f"({MENU}.value = 'last', {MENU}.onchange())")
                await tab.wait_for(captions_of(NUM_STEPS - 1))
                assert not tab.errors
        finally:
            await server.close()

    asyncio.run(check())


def test_another_step_needs_no_new_file_and_no_other_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REST", 1e6)
    source = ContentSource([make_run(tmp_path, "run")])
    first, second, again = (json.loads(source.read(choice).body) for choice in (None, "last", None))
    assert first == again and first["tag"] != second["tag"] and first["charts"] == second["charts"]
    changed = {name for name, html in first["sections"].items() if html != second["sections"][name]}
    assert changed == {"timeline", "lanes"} and f"run, step {NUM_STEPS}" in second["sections"]["lanes"]


def test_a_step_that_is_none_is_refused_and_a_missing_one_named(tmp_path: Path) -> None:
    async def check() -> None:
        server = WatchServer([make_run(tmp_path, "run")])
        url = await server.start()
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{url}/content?step=../2") as response:
                assert response.status == 400 and "Write a number, or one of" in await response.text()
            async with client.get(f"{url}/content?step=99") as response:
                content = await response.json()
        await server.close()
        assert "run: timeline.json does not contain step 99." in content["sections"]["timeline"]

    asyncio.run(check())
