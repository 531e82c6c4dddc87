"""Head of a page: the facts of each run, and the numbers that summarize it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

import yaml

from interlace.core.types import JSON
from interlace.core.yaml_text import parse_yaml
from interlace.observe.goodput import USEFUL, ledger_of
from interlace.observe.progress import duration, estimate_time_left, number, short
from interlace.observe.report.device_time import DeviceTimeline
from interlace.observe.report.panels import wilson_interval
from interlace.observe.run_data import EvaluationAnswer, RunData, read_answers
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_sessions import RunSession, read_sessions

_SOURCES = ("reasoning_gym", "files", "starts", "hub", "mixture")


OFFLINE_RESULTS = {
    "eval/loss": "held-out loss",
    "eval/row_accuracy": "right held-out completions",
    "eval/accuracy": "held-out pairs in order",
}
"""Results of runs that train on given rows, and their names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A fact of a run, or a number that summarizes it."""

    name: str
    value: str
    note: str = ""


def run_facts(run: RunData, config: str, sessions: Sequence[RunSession]) -> list[Card]:
    """Lists date, duration, command, model, algorithm, task, versions and machine, as far as the run recorded them."""
    settings = read_settings(config)
    facts = [
        ("date", _format_date(sessions)),
        ("duration", _format_duration(run, sessions)),
        ("command", sessions[-1].command if sessions else ""),
        ("model", _text(settings, "model", "path")),
        ("algorithm", _text(settings, "algorithm", "name")),
        ("task", _describe_task(settings)),
        ("reward", _text(settings, "reward", "name")),
        ("schedule", _text(settings, "schedule", "preset")),
        ("engine", _text(settings, "rollout", "engine")),
        ("devices", _text(settings, "cluster", "devices")),
        ("seed", _text(settings, "seed")),
        ("versions", ", ".join(f"{name} {text}" for name, text in sessions[-1].versions.items()) if sessions else ""),
        ("commit", (sessions[-1].commit or "") if sessions else ""),
        ("machine", f"{sessions[-1].host}: {sessions[-1].machine}" if sessions else ""),
        ("folder", str(run.folder)),
    ]
    return [Card(name=name, value=text) for name, text in facts if text]


@lru_cache(maxsize=64)
def read_settings(config: str) -> Mapping[str, JSON]:
    """Reads a config.yaml, once for all parts and versions of a page; empty for one that cannot be read."""
    try:
        found = parse_yaml(config)
    except (ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, Mapping) else {}


def find_asked_steps(config: str) -> int | None:
    """Returns the number of steps that config.yaml asks for; None if it has none."""
    found = read_settings(config).get("steps")
    return found if isinstance(found, int) else None


def _text(settings: Mapping[str, JSON], *path: str) -> str:
    """Returns a setting as text; empty if it is missing."""
    value = _find_setting(settings, *path)
    return "" if value is None or isinstance(value, Mapping | list) else str(value)


def _find_setting(settings: Mapping[str, JSON], *path: str) -> JSON:
    """Returns a setting, or the section of its path that is no mapping; None if it is missing."""
    value: JSON = dict(settings)
    for name in path:
        if not isinstance(value, Mapping):
            break  # a section written as one word
        value = value.get(name)
    return value


def _describe_task(settings: Mapping[str, JSON]) -> str:
    task = settings.get("task")
    if not isinstance(task, Mapping):
        return "" if task is None else str(task)
    parts = []
    for source in _SOURCES:
        value = task.get(source)
        if isinstance(value, Mapping):
            name = next((str(value[key]) for key in ("name", "path", "train") if value.get(key)), "")
            parts.append(f"{source}: {name}" if name else source)
        elif isinstance(value, list) and value:
            parts.append(f"{source} of {len(value)} sources")
    return ", ".join(parts + _describe_simulator(settings))


def _describe_simulator(settings: Mapping[str, JSON]) -> list[str]:
    """Returns the simulator of a robot's episodes with its tasks; empty for other episodes."""
    family = _text(settings, "episode", "env", "family")
    if not family:
        return []
    tasks = _find_setting(settings, "episode", "env", "settings", "tasks")
    return [f"{family}: {', '.join(map(str, tasks))}" if isinstance(tasks, list) and tasks else family]


def _format_date(sessions: Sequence[RunSession]) -> str:
    if not sessions:
        return ""
    times = "once" if len(sessions) == 2 else f"{len(sessions) - 1} times, last"
    resumed = f" (resumed {times} {_format_minute(sessions[-1])})" if len(sessions) > 1 else ""
    return f"{_format_minute(sessions[0])}{resumed}"


def _format_minute(session: RunSession) -> str:
    return session.started_at[:16].replace("T", " ")


def _format_duration(run: RunData, sessions: Sequence[RunSession]) -> str:
    steps = f"{duration(sum(run.values('timing_s/step')))} in {len(run.rows)} steps"
    if len(sessions) != 1:
        return steps
    try:
        start = datetime.fromisoformat(sessions[0].started_at).timestamp()
    except ValueError:
        return steps
    return f"{duration(max(0.0, run.written_at - start))} from the start to the last step; {steps}"


def summary_cards(run: RunData, config: str, *, is_running: bool = False) -> list[Card]:
    """Lists the numbers of a run that a reader wants first; the time left only of a run that trains at present."""
    return [card for card in _make_cards(run, read_settings(config), is_running=is_running) if card.value]


def _make_cards(run: RunData, settings: Mapping[str, JSON], *, is_running: bool) -> Iterator[Card]:
    ledger, seconds = ledger_of(run.rows), run.values("timing_s/step")
    if rewards := run.values("reward/mean"):
        change = f"{number(rewards[0], 2)} → {number(rewards[-1], 2)}"
        yield Card(name="reward", value=change, note="mean of a step, first → last")
    for kind in ("greedy", "sampled"):
        yield _make_accuracy_card(run, kind)
    for metric, name in OFFLINE_RESULTS.items():
        if values := run.values(metric):
            change = " → ".join(f"{value:.3g}" for value in dict.fromkeys((values[0], values[-1])))
            yield Card(name=name, value=change, note="first → last evaluation")
    asked = settings.get("steps")
    yield Card(name="steps", value=f"{len(run.rows)} of {asked}" if isinstance(asked, int) else str(len(run.rows)))
    if seconds:
        yield Card(name="time of a step", value=f"{number(sum(seconds) / len(seconds), 2)} s", note="mean")
        tokens = sum(run.values("perf/num_tokens")) / max(sum(seconds), 1e-9)
        yield Card(name="tokens/s", value=short(tokens), note="prompt and response tokens")
    if is_running and (left := time_left_s(run, settings)):
        yield Card(name="time left", value=duration(left), note="at the pace of the last steps")
    if ledger.total_s:
        useful = sum(ledger.fraction(name) for name in USEFUL)
        yield Card(name="useful device time", value=f"{useful:.0%}", note=" + ".join(USEFUL))
        if waste := ledger.largest_waste():
            yield Card(name="largest waste", value=f"{waste.fraction:.0%}", note=waste.name)
    yield from _make_suggestions(run)
    if mfu := run.values("perf/mfu"):
        yield Card(name="MFU", value=f"{sum(mfu) / len(mfu):.1%}", note="mean of the steps")
    if staleness := run.values("sched/staleness_max"):
        highest = f"≤ {max(staleness):.0f}" if max(staleness) else "0"
        yield Card(name="staleness", value=highest, note="versions")


def _make_suggestions(run: RunData) -> Iterator[Card]:
    """Yields the settings that `interlace advise` found for the run, if it was called."""
    path = RunFolder(path=run.folder).advice
    if not path.is_file():
        return
    try:
        found = [
            (each["setting"], f"{each['saving']:.0%}") for each in json.loads(path.read_text("utf-8"))["suggestions"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        yield Card(name="predicted saving", value="-", note=f"{path.name} is damaged: run `interlace advise` again")
        return
    for setting, saving in found:
        yield Card(name="predicted saving", value=saving, note=f"of a step, with {setting}")


def time_left_s(run: RunData, settings: Mapping[str, JSON]) -> float | None:
    """Returns the remaining steps times the mean time of the last PACE_STEPS steps; None for a complete run."""
    asked, seconds = settings.get("steps"), run.values("timing_s/step")
    if not isinstance(asked, int) or not seconds or len(run.rows) >= asked:
        return None
    return estimate_time_left(seconds, asked - len(run.rows))


def _make_accuracy_card(run: RunData, kind: str) -> Card:
    values = run.values(f"eval/accuracy_{kind}")
    counts = run.values("eval/num_prompts")
    note = "first → last evaluation" if len(values) > 1 else "one evaluation"
    if values and counts:
        low, high = wilson_interval(values[-1], counts[-1])
        note += f"; 95\u00a0% interval of the last {low:.3f} to {high:.3f}, n\u00a0=\u00a0{counts[-1]:.0f}"
    text = " → ".join(f"{value:.3f}" for value in dict.fromkeys((values[0], values[-1]))) if values else ""
    return Card(name=f"held-out accuracy, {kind}", value=text, note=note)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of a page."""

    run: RunData
    timeline: DeviceTimeline | None
    config: str
    """config.yaml."""
    sessions: Sequence[RunSession] = ()
    answers: Mapping[int, Sequence[EvaluationAnswer]] | None = None
    state: str = ""
    """Word on a live page: running, finished or stopped; empty on a report."""


def read_entry(run: RunData, folder: RunFolder, timeline: DeviceTimeline | None, *, state: str = "") -> Entry:
    """Reads the files of a run that the page needs in addition to its data and its timeline."""
    return Entry(
        run=run,
        timeline=timeline,
        config=folder.config.read_text(encoding="utf-8"),
        sessions=read_sessions(folder.path),
        answers=read_answers(folder.path),
        state=state,
    )
