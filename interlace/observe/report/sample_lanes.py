"""One lane per sample of a step: queue, turns with the version of the weights, tools, scoring and training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.observe.progress import printable
from interlace.observe.report.device_time import DeviceTimeline, DrawnBar, StepChoice, choose_step
from interlace.observe.report.sample_times import Period, TurnTime
from interlace.observe.run_data import RunData, Transcript

NUM_LANES = 48
"""Number of drawn samples of a step: the first ones in order of admission."""
VERSION_COLOURS = ("#3b82f6", "#1e3a8a", "#22d3ee", "#0f766e")
"""Colours of turns, by the version of the weights at their start, in turn."""
COLOURS = {"queue": "#fbbf24", "tool": "#f97316", "episode": "#d6a77a", "reward": "#a855f7", "train": "#16a34a"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePeriod:
    """One period of a sample. Times are seconds."""

    kind: str
    """generate, or a key of COLOURS."""
    start_s: float
    end_s: float
    text: str
    version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """The periods of one sample."""

    name: str
    bars: Sequence[DrawnBar]
    seconds: Sequence[float]
    """Total of each kind, in the order of KINDS."""
    waiting_s: float
    """Time between the first and the last period in no period."""
    num_turns: int
    num_tokens: int
    versions: str
    event: str
    reward: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LanesView:
    """The samples of one step."""

    run: str
    step: int
    seconds: float
    """Length of the window."""
    lanes: Sequence[Lane]
    num_more: int
    """Samples of the step without a lane."""
    legend: Sequence[tuple[str, str]]
    """Kind -> colour."""


KINDS = ("queue", "generate", "tool", "episode", "reward", "train")


def lanes_view(run: RunData, timeline: DeviceTimeline | None, step: StepChoice) -> LanesView | None:
    """Builds the lanes of the step that the device chart shows.

    Returns None if the trace does not contain the step, or has no turns of its samples.
    """
    chosen = choose_step(timeline, step) if timeline else None
    if timeline is None or chosen is None:
        return None
    samples = sorted(
        (sample for sample in run.transcripts if sample.step == chosen and sample.key in timeline.samples.turns),
        key=lambda sample: sample.key,
    )
    found = [(sample, _list_periods(sample, timeline)) for sample in samples[:NUM_LANES]]
    periods = [period for _, parts in found for period in parts]
    if not periods:
        return None
    start_s, end_s = min(each.start_s for each in periods), max(each.end_s for each in periods)
    versions = sorted({each.version for each in periods if each.kind == "generate"})
    colours = {version: VERSION_COLOURS[place % len(VERSION_COLOURS)] for place, version in enumerate(versions)}
    window = start_s, end_s
    return LanesView(
        run=run.name,
        step=chosen,
        seconds=end_s - start_s,
        lanes=[_make_lane(sample, timeline, parts, colours, window) for sample, parts in found],
        num_more=len(samples) - len(found),
        legend=[
            *((f"turn, version {version}", colour) for version, colour in colours.items()),
            *((kind, COLOURS[kind]) for kind in KINDS if any(each.kind == kind for each in periods)
              and kind in COLOURS),
        ],
    )  # fmt: skip


def _list_periods(sample: Transcript, timeline: DeviceTimeline) -> list[SamplePeriod]:
    times = timeline.samples
    turns = times.turns[sample.key]
    last_s = max((end_s for _, end_s in timeline.steps.values()), default=math.inf)
    found: list[SamplePeriod] = []
    for place, turn in enumerate(turns):
        end_s = min(turn.end_s, last_s)
        found.append(_make_period("queue", turn.asked_s, turn.start_s, f"wait of turn {turn.turn} for {turn.engine}"))
        found.append(_make_period("generate", turn.start_s, end_s, _describe_turn(turn), turn.first_version))
        following = turns[place + 1].asked_s if place + 1 < len(turns) else math.inf
        found += _list_between(sample, turn, following)
    after_s = max(min(turn.end_s, last_s) for turn in turns)
    name = (sample.uid, sample.key[1])
    for kind, periods in (("reward", times.scored.get(name, ())), ("train", times.trained.get(name, ()))):
        # Only the first one: a later admission of the same prompt has later ones.
        found += [_make_period(kind, *period, kind) for period in sorted(p for p in periods if p[0] >= after_s)[:1]]
    return [each for each in found if each.end_s > each.start_s]


def _list_between(sample: Transcript, turn: TurnTime, following_s: float) -> list[SamplePeriod]:
    """Returns the tools after a turn, and the episode's code until the next request."""
    tool_s = sum(seconds for number, seconds in sample.tools if number == turn.turn)
    if turn.num_tokens is None or (not tool_s and math.isinf(following_s)):
        return []
    ended_s = min(turn.end_s + tool_s, following_s)
    found = [_make_period("tool", turn.end_s, ended_s, f"tools after turn {turn.turn}")]
    if not math.isinf(following_s):
        found.append(_make_period("episode", ended_s, following_s, f"code of the episode after turn {turn.turn}"))
    return found


def _make_period(kind: str, start_s: float, end_s: float, text: str, version: int = 0) -> SamplePeriod:
    return SamplePeriod(kind=kind, start_s=start_s, end_s=max(start_s, end_s), text=text, version=version)


def _describe_turn(turn: TurnTime) -> str:
    tokens = "interrupted" if turn.num_tokens is None else f"{turn.num_tokens} tokens"
    return f"turn {turn.turn} on {turn.engine}, {tokens}, {format_versions(turn.first_version, turn.last_version)}"


def format_versions(first: int, last: int) -> str:
    """Describes the versions of the weights that drew a turn or a sample."""
    return f"version {first}" if first == last else f"versions {first} to {last}"


def _make_lane(
    sample: Transcript,
    timeline: DeviceTimeline,
    parts: Sequence[SamplePeriod],
    colours: Mapping[int, str],
    window: Period,
) -> Lane:
    start_s, end_s = window
    length = max(end_s - start_s, 1e-9)
    bars = [
        DrawnBar(
            left=100 * (each.start_s - start_s) / length,
            width=100 * (each.end_s - each.start_s) / length,
            colour=COLOURS.get(each.kind) or colours[each.version],
            text=f"{each.text}: {(each.end_s - each.start_s) * 1e3:.1f} ms",
        )
        for each in parts
    ]
    seconds = [sum(each.end_s - each.start_s for each in parts if each.kind == kind) for kind in KINDS]
    whole = max(each.end_s for each in parts) - min(each.start_s for each in parts)
    return Lane(
        name=printable(f"{sample.uid} [{sample.key[1]}]"),
        bars=bars,
        seconds=seconds,
        waiting_s=max(0.0, whole - sum(seconds)),
        num_turns=len({turn.turn for turn in timeline.samples.turns[sample.key]}),
        num_tokens=sample.num_tokens,
        versions=""
        if sample.version_min is None or sample.version_max is None
        else format_versions(sample.version_min, sample.version_max),
        event=sample.event,
        reward=sample.reward,
    )
