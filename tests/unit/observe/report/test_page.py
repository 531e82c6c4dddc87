"""The report has the numbers of the run, needs no network, and a browser shows it without an error at two widths."""

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.core.types import SampleKey
from interlace.observe.goodput import BINS, PREFIX
from interlace.observe.report.page import staleness_of, write_report
from interlace.observe.report.panels import build_panels
from interlace.observe.report.samples import answers_over_time, failure_causes, sample_groups
from interlace.observe.run_data import EvaluationAnswer, RunData, write_answers
from interlace.observe.run_folder import RunFolder
from interlace.runtime.timeline import EngineCall, Records, Span, StepRecord, TurnEnd, TurnStart
from interlace.runtime.trace import TraceFile
from interlace.schedule.placement import Device
from tests.support.browser import BROWSER, FLAGS, needs_browser

HOSTILE = "</pre><script>alert('&')</script>\x1b[31m"
NUM_STEPS = 6
WIDTHS = (1280, 520)


def _metrics(step: int, lag: int) -> dict[str, float]:
    shares = {PREFIX + name: 0.0 for name in BINS} | {"goodput/train": 0.5, "goodput/tail_bubble": 0.5}
    return {
        "step": step, "version": step, "reward/mean": step / 10, "response_length/mean": 20.0 + step,
        "actor/entropy": 1.0 / step,
        "actor/kl": 1e-5 * step, "timing_s/step": 2.0, "perf/num_tokens": 100, "perf/throughput": 50.0,
        "actor/clip_fraction": 0.0, "samples/filtered": step % 2, "reward/std": 0.5,
        "sched/staleness_mean": lag, "sched/staleness_max": lag, "goodput/trained_tokens_per_device_s": 12.5, **shares,
    }  # fmt: skip


def _sample(step: int, index: int, lag: int) -> dict[str, object]:
    return {
        "step": step, "group": step, "uid": f"p{index}", "index": index, "prompt": "1 + 1", "response": HOSTILE,
        "token_ids": [1],
        "num_tokens": 10 + index, "reward": float(index), "version_min": max(0, step - 1 - lag),
        "version_max": step - 1,
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
    keys = [SampleKey(step + 1, index) for index in range(4)]
    call = EngineCall(
        span=spans[0],
        devices=(0, 1),
        batch=4,
        num_new_tokens=46,
        num_prompt_tokens=4,
        num_repeated_tokens=0,
        begun=[TurnStart(*key, 0, max(0.0, 2.0 * step - 0.1)) for key in keys],
        ended=[TurnEnd(*key, 0, 10 + key.index) for key in keys],
    )
    return Records(spans=spans, running=[], served=[call], steps=[ended], num_dropped_tokens=0, end_s=2.0 * step + 2)


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
    rows = [{"step": step, "eval/accuracy_greedy": step / 10, "eval/num_prompts": 64} for step in (0, NUM_STEPS)]
    folder.evaluations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (0, NUM_STEPS):
        shown = EvaluationAnswer(
            uid="q1", prompt="2 + 2", right_answer="4", response=f"{HOSTILE}{step}", correct=step > 0
        )
        write_answers(folder.path, step, [shown])
    return folder


def two_runs(root: Path) -> Path:
    path = root / "report.html"
    write_report([make_run(root, "first"), make_run(root, "second", lag=2)], path)
    return path


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Writes the report of two runs."""
    return two_runs(tmp_path)


class _ChartData(HTMLParser):
    """Finds the data of the charts, and the titles of the figures that show them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.charts: dict[str, dict[str, object]] = {}
        self.figures: list[str] = []
        self.tables_without_caption = 0
        self._in_data = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._in_data = tag == "script" and found.get("id") == "chart-data"
        if "data-chart" in found:
            self.figures.append(str(found["data-chart"]))
        self.tables_without_caption += {"table": 1, "caption": -1}.get(tag, 0)

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.charts = json.loads(data)
            self._in_data = False

    def titled(self, title: str) -> dict[str, object]:
        return next(chart for chart in self.charts.values() if chart["title"] == title)


def read_page(path: Path) -> _ChartData:
    return _ChartData(path.read_text(encoding="utf-8"))


def test_the_numbers_of_the_charts_are_those_of_the_metrics_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    write_report([folder], tmp_path / "report.html")
    page, rows = read_page(tmp_path / "report.html"), [json.loads(line) for line in folder.metrics.open()]
    for title, metric in {"Reward": "reward/mean", "KL": "actor/kl", "Entropy": "actor/entropy"}.items():
        chart = page.titled(title)
        assert chart["steps"] == [row["step"] for row in rows]
        assert chart["curves"][0]["values"] == [row[metric] for row in rows]
    band = page.titled("Reward")["curves"][0]
    assert band["high"] == [row["reward/mean"] + row["reward/std"] for row in rows]


def test_evaluations_are_points_with_intervals(report: Path) -> None:
    chart = read_page(report).titled("Held-out accuracy, greedy")
    assert chart["kind"] == "points" and chart["steps"] == [0, NUM_STEPS]
    curve = chart["curves"][0]
    assert curve["values"] == [0.0, 0.6] and curve["low"][1] < 0.6 < curve["high"][1]


def test_a_panel_of_constants_is_left_out_and_its_metric_listed(tmp_path: Path) -> None:
    write_report([make_run(tmp_path, "run")], tmp_path / "report.html")
    titles = {chart["title"] for chart in read_page(tmp_path / "report.html").charts.values()}
    assert not {"Clip fraction", "Staleness"} & titles
    assert "<code>actor/clip_fraction</code> = 0" in (tmp_path / "report.html").read_text()


def test_every_chart_has_a_figure_and_every_table_a_caption(report: Path) -> None:
    page = read_page(report)
    assert sorted(page.figures) == sorted(page.charts)
    assert page.tables_without_caption == 0


def test_the_links_of_the_header_lead_to_the_sections(report: Path) -> None:
    html = report.read_text()
    links = re.findall(r'<a href="#(\w+)">', html)
    assert links == re.findall(r'<section id="(\w+)"', html)[1:] and "samples" in links and "episodes" not in links


def test_the_report_needs_no_network_and_allows_no_script_but_its_own(report: Path) -> None:
    html = report.read_text()
    assert set(re.findall(r"[a-z]+://[^\s\"')]+", html)) == {"https://github.com/leeoniya/uPlot"}, "a comment of uPlot"
    assert re.search(r"default-src &#39;none&#39;; .*script-src &#39;sha256-", html)


def test_text_of_models_and_names_of_runs_cannot_become_markup(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    metrics = json.loads(folder.metrics.read_text().splitlines()[0])
    metrics |= {"reward/</script><b>": 1.0}
    folder.metrics.write_text(
        json.dumps(metrics) + "\n" + json.dumps(metrics | {"step": 2, "reward/</script><b>": 2}) + "\n"
    )
    write_report([folder], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in html and "</script><b>" not in html
    assert "&lt;/pre&gt;&lt;script&gt;alert(&#39;&amp;&#39;)" in html
    assert "\x1b" not in html and "\\x1b[31m" in html
    assert "note: a &lt; b" in html


def test_the_largest_waste_is_named_with_the_setting_that_governs_it(report: Path) -> None:
    assert "Largest waste: tail_bubble, 50.0% of the steps&#39; device time; governed by tail" in report.read_text()


def test_staleness_of_a_sample_is_the_measured_one(tmp_path: Path) -> None:
    found = staleness_of(RunData.read(make_run(tmp_path, "run", lag=2)))
    assert found == [0] * 3 + [1] * 3 + [2] * 3 * (NUM_STEPS - 2)


def test_the_samples_are_the_best_the_worst_and_one_prompt_over_time(tmp_path: Path) -> None:
    groups = {group.title: group.samples for group in sample_groups(RunData.read(make_run(tmp_path, "run")))}
    assert groups["Best"][0].head == "Step 6: reward 3, 13 tokens, trained, version 5: p3"
    assert groups["Worst"][0].head.startswith("Step 6: reward 0,")
    assert [sample.head.partition(":")[0] for sample in groups["One prompt over time"]] == [
        "Step 1", "Step 2", "Step 3", "Step 5", "Step 6",
    ]  # fmt: skip


def test_the_answers_to_a_held_out_prompt_are_shown_over_time() -> None:
    right, wrong = (
        EvaluationAnswer(uid=uid, prompt="2 + 2", right_answer="4", response=uid, correct=True)
        for uid in ("always", "later")
    )
    answers = {
        step: [right, wrong.model_copy(update={"correct": step > 20, "response": str(step)})] for step in (0, 20, 40)
    }
    [group] = answers_over_time(answers)
    assert [sample.response for sample in group.samples] == ["0", "20", "40"]
    assert group.samples[-1].head == "Step 40: right: later"
    assert not answers_over_time({step: answers[step] for step in (0, 40)})


def test_answers_before_and_after_training_are_paired(report: Path) -> None:
    html = report.read_text()
    assert "q1: wrong → right" in html


def test_samples_without_training_are_counted_by_cause(tmp_path: Path) -> None:
    [cause] = failure_causes(RunData.read(make_run(tmp_path, "run")))
    assert (cause.event, cause.count, cause.first_step, cause.last_step) == ("filtered", NUM_STEPS, 1, NUM_STEPS)


def test_a_step_can_be_chosen(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    write_report([folder], tmp_path / "two.html", step=2)
    html = (tmp_path / "two.html").read_text()
    assert "run, step 2" in html and "cpu:1" in html and "rollout.serve (generate): 900.0 ms" in html
    write_report([folder], tmp_path / "none.html", step=99)
    assert "timeline.json does not contain step 99" in (tmp_path / "none.html").read_text()


def test_a_run_of_one_step_without_rewards_or_timeline_has_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "short")
    folder.metrics.write_text(json.dumps({"step": 1, "version": 1, "timing_s/step": 1.0}) + "\n")
    folder.timeline.unlink()
    for path in folder.samples.iterdir():
        path.unlink()
    write_report([folder], tmp_path / "short.html")
    assert "The run has no timeline.json" in (tmp_path / "short.html").read_text()


def test_a_run_on_given_rows_has_no_section_of_samples(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "sft")
    for path in (*folder.samples.iterdir(), *folder.path.glob("answers.jsonl")):
        path.unlink()
    write_report([folder], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert 'id="samples"' not in html and 'href="#samples"' not in html


def test_a_run_that_was_killed_while_it_wrote_a_line_has_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "killed")
    with folder.metrics.open("a") as file:
        file.write('{"step": 7, "reward/mean": 0.')
    write_report([folder], tmp_path / "report.html")
    assert read_page(tmp_path / "report.html").titled("Reward")["steps"][-1] == NUM_STEPS


def test_a_run_with_damaged_advice_has_a_report(tmp_path: Path) -> None:
    run, page = make_run(tmp_path, "one"), tmp_path / "report.html"
    for text, note in (
        ('{"suggestions": [{"setting": "a=1", "saving": 0.25}]}', "of a step, with a=1"),
        ('{"suggestions": [{', "advice.json is damaged"),
    ):
        run.advice.write_text(text)
        write_report([run], page)
        assert note in page.read_text()


def test_a_run_that_logged_nothing_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "empty")
    for path in (folder.metrics, folder.evaluations, *folder.samples.iterdir()):
        path.write_text("")
    with pytest.raises(UserError, match="has logged no step yet"):
        write_report([folder], tmp_path / "report.html")


def test_a_run_that_failed_in_its_first_step_has_a_report_with_the_cause(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "failed")
    folder.metrics.write_text("")
    for path in folder.samples.iterdir():
        path.unlink()
    failed = _sample(1, 0, 0) | {"event": "failed", "reason": "ValueError: no luck", "reward": None}
    (folder.samples / "step_000001.jsonl").write_text(json.dumps(failed) + "\n")
    write_report([folder], tmp_path / "report.html")
    assert "ValueError: no luck" in (tmp_path / "report.html").read_text()


def browse(page: Path, profile: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


MEASURE = (
    "<script>document.querySelectorAll('details').forEach((one) => (one.open = true));"
    "document.body.dataset.scroll = document.documentElement.scrollWidth;</script></body>"
)


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_draws_every_chart_without_an_error_and_cuts_nothing_off(
    report: Path, tmp_path: Path, width: int
) -> None:
    html = report.read_text()
    measured = tmp_path / "measured.html"
    measured.write_text(re.sub(r"<meta http-equiv[^>]*>", "", html).replace("</body>", MEASURE))
    shown = browse(
        measured, tmp_path / "profile", f"--window-size={width},2000", "--enable-logging=stderr", "--dump-dom"
    )
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count("<canvas") == len(read_page(report).charts) > 0
    assert '<td class="u-value"></td>' not in shown.stdout, "without a cursor the legend has the last values"
    assert re.search(r'data-scroll="(\d+)"', shown.stdout)[1] == str(width), "the page scrolls sideways"


@needs_browser
def test_the_policy_of_the_page_admits_its_script(report: Path, tmp_path: Path) -> None:
    shown = browse(report, tmp_path / "profile", "--enable-logging=stderr", "--dump-dom")
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count("<canvas") == len(read_page(report).charts)


def test_the_band_of_the_reward_stays_within_its_rewards_and_repeated_panels_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"step": step, "reward/mean": step / 4, "reward/accuracy": step / 4, "reward/std": 0.5, "reward/min": 0.0,
         "reward/max": 1.0, "eval/gcd/accuracy_greedy": step / 8}
        for step in (1, 2, 3)
    ]  # fmt: skip
    reward, by_set = build_panels([RunData(name="run", folder=tmp_path, rows=rows, transcripts=[])]).shown
    assert (reward.curves[0].low, reward.curves[0].high) == ([0.0, 0.0, 0.25], [0.75, 1.0, 1.0])
    assert [curve.label for curve in by_set.curves] == ["gcd, greedy"]
