"""The live page follows the files of a run, answers this machine alone, and opens a run in any state."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_lock import RunLock
from interlace.observe.watch import server as server_module
from interlace.observe.watch.server import ContentSource, WatchServer
from tests.support.browser import BROWSER, FLAGS, needs_browser
from tests.unit.observe.report.test_page import HOSTILE, NUM_STEPS, WIDTHS, make_run

aiohttp = pytest.importorskip("aiohttp")


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REST", 0.0)


def content_of(source: ContentSource) -> dict[str, object]:
    return json.loads(source.read().body)


def append_step(folder: RunFolder, step: int, end: str = "\n") -> None:
    row = json.loads(folder.metrics.read_text().splitlines()[-1]) | {"step": step, "reward/mean": 0.5}
    with folder.metrics.open("a") as file:
        file.write(json.dumps(row) + end)


def state_of(folder: RunFolder) -> str:
    html = content_of(ContentSource([folder]))["sections"]["header"]
    return re.search(r'class="state">([^<]*)<', html)[1]


@asynccontextmanager
async def served(*folders: RunFolder) -> AsyncIterator[str]:
    server = WatchServer(folders)
    url = await server.start()
    try:
        yield url
    finally:
        await server.close()


def test_the_content_has_the_new_step_once_its_line_is_whole(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    source = ContentSource([folder])
    first = content_of(source)
    assert first["charts"]["panel-0"]["steps"][-1] == NUM_STEPS
    assert content_of(source)["tag"] == first["tag"], "nothing has changed"
    append_step(folder, NUM_STEPS + 1, end="")
    assert content_of(source)["charts"]["panel-0"]["steps"][-1] == NUM_STEPS
    with folder.metrics.open("a") as file:
        file.write("\n")
    later = content_of(source)
    assert later["charts"]["panel-0"]["steps"][-1] == NUM_STEPS + 1 and later["tag"] != first["tag"]


def test_the_step_of_the_devices_and_lanes_can_be_chosen(tmp_path: Path) -> None:
    sections = content_of(ContentSource([make_run(tmp_path, "run")], 2))["sections"]
    assert "run, step 2" in sections["timeline"] and "run, step 2" in sections["lanes"]


def test_suggestions_appear_on_the_page_of_a_finished_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    source = ContentSource([folder])
    assert "predicted saving" not in content_of(source)["sections"]["header"]
    folder.advice.write_text(json.dumps({"suggestions": [{"setting": "sync_every=2", "saving": 0.1}]}))
    assert "predicted saving" in content_of(source)["sections"]["header"]


def test_a_page_that_costs_much_is_rebuilt_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REST", 1e6)
    folder = make_run(tmp_path, "run")
    source = ContentSource([folder])
    first = content_of(source)
    append_step(folder, NUM_STEPS + 1)
    assert content_of(source) == first


def test_the_end_of_one_of_three_runs_is_shown_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of several runs takes seconds to build on a busy machine, and the server then rests for minutes."""
    monkeypatch.setattr(server_module, "REST", 1e6)
    folders = [make_run(tmp_path, name) for name in ("one", "two", "three")]
    folders[1].config.write_text(f"steps: {NUM_STEPS + 1}\n")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folders[1].process.write_text(json.dumps({"pid": process.pid, "host": socket.gethostname()}))
    source = ContentSource(folders)
    assert 'class="state">running<' in content_of(source)["sections"]["header"]
    process.communicate()
    header = content_of(source)["sections"]["header"]
    assert "running" not in header and header.count("ended unexpectedly") == 1


def test_each_request_after_the_end_of_a_run_with_a_damaged_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request returned the content from before the end, in which the run trains."""
    monkeypatch.setattr(server_module, "REST", 1e6)
    folder = make_run(tmp_path, "run")
    source = ContentSource([folder])
    with RunLock(folder):
        assert 'class="state">running<' in content_of(source)["sections"]["header"]
        folder.metrics.write_text("{broken\n" + folder.metrics.read_text())
    for _ in range(2):
        with pytest.raises(UserError, match="is damaged: Expecting property name"):
            source.read()


def test_the_page_shows_whether_the_run_trains(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    folder.config.write_text(f"steps: {NUM_STEPS + 1}\n")
    assert state_of(folder) == "stopped"
    assert "time left" not in content_of(ContentSource([folder]))["sections"]["header"]
    folder.process.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    assert state_of(folder) == "running"
    assert "time left" in content_of(ContentSource([folder]))["sections"]["header"]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder.process.write_text(json.dumps({"pid": ended.pid, "host": socket.gethostname()}))
    assert state_of(folder).startswith("ended unexpectedly")
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with RunLock(folder):
        holder = json.loads(folder.process.read_text())
    folder.process.write_text(json.dumps({**holder, "pid": other.pid}))
    assert state_of(folder).startswith("ended unexpectedly"), "another process has the number"
    other.communicate()
    folder.process.unlink()
    append_step(folder, NUM_STEPS + 1)
    assert state_of(folder) == "finished"


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "new")
    for path in (folder.metrics, folder.evaluations, folder.timeline, *folder.samples.iterdir()):
        path.unlink()
    assert "new" in content_of(ContentSource([folder]))["sections"]["header"]


def test_several_runs_share_each_chart(tmp_path: Path) -> None:
    content = content_of(ContentSource([make_run(tmp_path, "first"), make_run(tmp_path, "second", lag=2)]))
    assert [curve["label"] for curve in content["charts"]["panel-0"]["curves"]] == ["first", "second"]


def test_the_server_answers_this_machine_alone_and_sends_content_once(tmp_path: Path) -> None:
    async def check() -> None:
        async with served(make_run(tmp_path, "run")) as url, aiohttp.ClientSession() as client:
            assert url.startswith("http://127.0.0.1:")
            async with client.get(f"{url}/content") as response:
                content = await response.json()
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert "<script>alert" not in json.dumps(content["sections"]) and HOSTILE not in json.dumps(content)
            async with client.get(f"{url}/content?tag={content['tag']}") as response:
                assert response.status == 204
            async with client.get(f"{url}/content", headers={"Host": "attacker.example"}) as response:
                assert response.status == 403
            async with client.get(f"{url}/assets/..%2Fpage.py") as response:
                assert response.status == 404

    asyncio.run(check())


def test_a_damaged_file_is_named_on_the_page_and_the_server_stays(tmp_path: Path) -> None:
    async def check() -> None:
        folder = make_run(tmp_path, "run")
        whole = folder.metrics.read_text()
        folder.metrics.write_text("{broken\n" + whole)
        async with served(folder) as url, aiohttp.ClientSession() as client:
            async with client.get(f"{url}/content") as response:
                assert response.status == 503 and "metrics.jsonl is damaged" in await response.text()
            folder.metrics.write_text(whole)
            async with client.get(f"{url}/content") as response:
                assert response.status == 200

    asyncio.run(check())


def test_a_taken_port_is_a_sentence(tmp_path: Path) -> None:
    async def check() -> None:
        folder = make_run(tmp_path, "run")
        async with served(folder) as url:
            with pytest.raises(UserError, match="Choose another --port"):
                await WatchServer([folder]).start(int(url.rpartition(":")[2]))

    asyncio.run(check())


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_draws_the_live_page_without_an_error(tmp_path: Path, width: int) -> None:
    folder = make_run(tmp_path, "run")
    flags = [
        *FLAGS,
        "--enable-logging=stderr",
        "--virtual-time-budget=3000",
        "--dump-dom",
        f"--window-size={width},2000",
    ]

    async def check() -> tuple[str, str]:
        async with served(folder) as url:
            command = [str(BROWSER), *flags, f"--user-data-dir={tmp_path / 'profile'}", url]
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            out, log = await asyncio.wait_for(process.communicate(), 120)
            return out.decode(), log.decode()

    dom, log = asyncio.run(check())
    assert "CONSOLE" not in log
    assert dom.count("<canvas") == len(content_of(ContentSource([folder]))["charts"]) > 0
    assert "Live: the page follows the files of the run." in dom


def ignore_interrupts() -> None:
    """Ignores SIGINT, as a shell does for the background jobs of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_the_page_until_it_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    folder = make_run(tmp_path, "run")
    command = [sys.executable, "-c", "from interlace.cli.main import app; app()", "watch", str(folder.path), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=ignore_interrupts) as process:
        assert process.stdout
        line = process.stdout.readline()
        assert re.fullmatch(r"watching run: http://127\.0\.0\.1:\d+\n", line)
        process.send_signal(number)
        assert process.wait(30) == 0
        assert process.stdout.read() == "stopped\n"
