"""The report contains every figure, needs no network, and has no errors in browsers."""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from interlace.core.errors import UserError
from interlace.observe.goodput import BINS, PREFIX
from interlace.observe.report.page import write_report
from interlace.observe.report.sections import staleness_of
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.runtime.timeline import Records, Span, StepRecord
from interlace.runtime.trace import TraceFile
from interlace.schedule.placement import Device


class Size(NamedTuple):
    """Pixels."""

    width: int
    height: int


HOSTILE = "</pre><script>alert('&')</script>\x1b[31m"
FIGURES = (
    "Reward", "Held-out accuracy, greedy", "Held-out accuracy, sampled", "Response length", "Entropy", "KL",
    "Staleness", "Throughput", "Response lengths",
)  # fmt: skip
NUM_STEPS = 6
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium and no google-chrome is installed")
SCREENSHOT = Path(__file__).with_name("screenshot.png")
SHOT = Size(1240, 3900)
BLOCK = 20
TOLERANCE = 4.0
"""Between two machines' fonts; of 255."""


def _metrics(step: int, lag: int) -> dict[str, float]:
    shares = {PREFIX + name: 0.0 for name in BINS} | {"goodput/train": 0.5, "goodput/tail_bubble": 0.5}
    return {
        "step": step, "version": step, "reward/mean": step / 10, "eval/accuracy_greedy": 0.5,
        "eval/accuracy_sampled": 0.4, "response_length/mean": 20.0 + step, "actor/entropy": 1.0 / step,
        "actor/kl": 1e-5 * step, "timing_s/step": 2.0, "perf/num_tokens": 100, "perf/throughput": 50.0,
        "sched/staleness_mean": lag, "sched/staleness_max": lag, "goodput/trained_tokens_per_device_s": 12.5, **shares,
    }  # fmt: skip


def _sample(step: int, index: int, lag: int) -> dict[str, object]:
    return {
        "step": step, "uid": f"p{index}", "index": 0, "prompt": "1 + 1", "response": HOSTILE, "token_ids": [1],
        "num_tokens": 10 + index, "reward": 1.0, "version_min": max(0, step - 1 - lag), "version_max": step - 1,
        "event": "trained" if index else "filtered",
    }  # fmt: skip


def _records(step: int) -> Records:
    spans = [
        Span(
            start_s=2.0 * step + number,
            end_s=2.0 * step + number + 0.9,
            devices=(0, 1),
            group=["rollout/0", "actor/0"][number],
            rank=0,
            operation=operation,
            cause=["generate", "train"][number],
            step=step + 1,
            version=step,
            bin=["generate", "train"][number],
        )
        for number, operation in enumerate(["serve", "accumulate"])
    ]
    ended = StepRecord(step=step + 1, start_s=2.0 * step, end_s=2.0 * step + 2, counts={})
    return Records(spans=spans, running=[], served=[], steps=[ended], num_dropped_tokens=0, end_s=2.0 * step + 2)


def make_run(root: Path, name: str, *, lag: int = 0) -> RunFolder:
    folder = RunFolder.create(root, name)
    folder.config.write_text("model: tiny:micro\nnote: a < b\n")
    folder.metrics.write_text("".join(json.dumps(_metrics(step, lag)) + "\n" for step in range(1, NUM_STEPS + 1)))
    devices = [Device(index=i, pool="cpu", pool_index=i, memory_bytes=1) for i in range(2)]
    trace = TraceFile(folder.timeline, devices)
    for step in range(NUM_STEPS):
        rows = [_sample(step + 1, index, lag) for index in range(4)]
        path = folder.samples / f"step_{step + 1:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        trace.keep(_records(step))
    trace.close(Records(spans=[], running=[], served=[], steps=[], num_dropped_tokens=0, end_s=2.0 * NUM_STEPS))
    return folder


def two_runs(root: Path) -> Path:
    path = root / "report.html"
    write_report([make_run(root, "first"), make_run(root, "second", lag=2)], path)
    return path


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Of two runs."""
    return two_runs(tmp_path)


def test_every_figure_is_there_and_is_valid(report: Path) -> None:
    html = report.read_text()
    drawn = {ElementTree.fromstring(svg).attrib["aria-label"] for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)}
    assert set(FIGURES) | {"first", "second"} <= drawn
    assert html.count('aria-label="second"') == 3, "its ledger, its steps and its Gantt chart"
    assert "second, step 4" in html and "cpu:1" in html and "rollout.serve (generate): 900.0 ms" in html


def test_it_needs_no_network_and_runs_no_script(report: Path) -> None:
    html = report.read_text()
    assert "://" not in html
    assert not re.search(r"<script|@import|url\(|<img|<iframe", html)


def test_what_models_write_is_text(report: Path) -> None:
    html = report.read_text()
    assert "&lt;/pre&gt;&lt;script&gt;alert(&#x27;&amp;&#x27;)" in html
    assert "\x1b" not in html and "\\x1b[31m" in html
    assert "note: a &lt; b" in html


def test_the_largest_waste_and_what_governs_it_are_told(report: Path) -> None:
    assert "Largest waste: tail_bubble, 50.0% of the steps&#x27; device time; governed by tail" in report.read_text()


def test_staleness_of_a_sample_is_what_the_step_measured(tmp_path: Path) -> None:
    found = staleness_of(RunData.read(make_run(tmp_path, "run", lag=2)))
    assert found == [0] * 3 + [1] * 3 + [2] * 3 * (NUM_STEPS - 2)


def test_a_step_can_be_chosen(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    write_report([folder], tmp_path / "two.html", step=2)
    assert "run, step 2" in (tmp_path / "two.html").read_text()
    write_report([folder], tmp_path / "none.html", step=99)
    assert "timeline.json does not hold step 99" in (tmp_path / "none.html").read_text()


def test_a_run_of_one_step_without_rewards_or_timeline_has_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "short")
    folder.metrics.write_text(json.dumps({"step": 1, "version": 1, "timing_s/step": 1.0}) + "\n")
    folder.timeline.unlink()
    for path in folder.samples.iterdir():
        path.unlink()
    write_report([folder], tmp_path / "short.html")
    assert "There is no timeline.json" in (tmp_path / "short.html").read_text()


def test_a_run_that_logged_nothing_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "empty")
    folder.metrics.write_text("")
    with pytest.raises(UserError, match="has logged no step yet"):
        write_report([folder], tmp_path / "report.html")


def browse(page: Path, profile: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    always = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    command = [str(BROWSER), *always, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@needs_browser
def test_a_browser_shows_it_without_an_error(report: Path, tmp_path: Path) -> None:
    shown = browse(report, tmp_path / "profile", "--enable-logging=stderr", "--dump-dom")
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count("<svg") == report.read_text().count("<svg") > 0


def looks(page: Path, tmp_path: Path) -> Image.Image:
    """What a browser draws of it, in blocks of some pixels: letters of another font look the same."""
    shot = tmp_path / f"{page.stem}.png"
    size = f"--window-size={SHOT.width},{SHOT.height}"
    browse(page, tmp_path / "profile", size, f"--screenshot={shot}")
    return Image.open(shot)


def blocks(image: Image.Image) -> np.ndarray:
    small = image.convert("RGB").resize((SHOT.width // BLOCK, SHOT.height // BLOCK), Image.Resampling.BOX)
    return np.asarray(small, np.float32)


def difference(first: Image.Image, second: Image.Image) -> float:
    """Mean over blocks of the largest difference of a colour, 0 ... 255; a shift of the rows by a block is forgiven."""
    one, two = blocks(first), blocks(second)
    return min(float(np.abs(np.roll(one, shift, axis=0) - two).max(axis=2).mean()) for shift in (-1, 0, 1))


@needs_browser
def test_it_looks_like_the_stored_screenshot(report: Path, tmp_path: Path) -> None:
    """`python -m tests.unit.observe.report.test_page` stores another, after a look at it."""
    stored, shown = Image.open(SCREENSHOT), looks(report, tmp_path)
    assert difference(shown, stored) < TOLERANCE, f"look at {tmp_path / 'report.png'}"
    one_run = tmp_path / "one.html"
    write_report([RunFolder(path=tmp_path / "first")], one_run)
    assert difference(looks(one_run, tmp_path), stored) > 3 * TOLERANCE, "another page would be noticed"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        page = two_runs(root)
        looks(page, root).quantize(64).save(SCREENSHOT, optimize=True)
