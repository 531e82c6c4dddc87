"""Curves of a page: the metrics of each panel, and their values by step for each run."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from interlace.observe.run_data import RunData

RUN_COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626")
ROUNDING = 1e-5
"""Relative difference of values that are equal up to rounding; an axis could not show it."""
CONFIDENCE_Z = 1.96
"""Half width of a 95 % interval, in standard errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A metric of a panel."""

    metric: str
    label: str
    spread: str | None = None
    """Metric of the standard deviation; the band is the value plus and minus it, within `bounds`."""
    bounds: tuple[str, str] | None = None
    """Metrics of the lower and upper end of the band, or, with `spread`, of its limits."""
    scale: float = 1.0
    """Factor from the metric's unit to the unit of the panel; only for a line without a band."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelSpec:
    """A panel of the page."""

    title: str
    note: str
    """Unit and meaning."""
    lines: tuple[Line, ...]
    is_proportion: bool = False
    """True for evaluations: points with error bars. Several runs have one panel per line, so that each has a colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A line of a panel, for one run. Lists are as long as the panel's steps; None for a step without a value."""

    label: str
    colour: str
    dash: int
    """Number of the dash pattern; 0 is a solid line."""
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    is_exact: bool = False
    """True for a curve that is never smoothed: learning rates, and evaluations, which are few and far apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A panel with its values."""

    id: str
    title: str
    note: str
    kind: str
    """lines, points, stack or outline."""
    steps: Sequence[float]
    curves: Sequence[Curve]
    x_label: str = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningPanels:
    """The panels that change during the runs, and the metrics of those that do not."""

    shown: Sequence[Panel]
    constants: Mapping[str, float] = field(default_factory=dict)


def _make_single(title: str, metric: str, note: str) -> PanelSpec:
    return PanelSpec(title=title, note=note, lines=(Line(metric=metric, label=title),))


_EVENTS = ("filtered", "failed", "stale", "surplus")
PANELS = (
    PanelSpec(
        title="Reward",
        note="mean over the scored samples of the step; band: one standard deviation, within the rewards of the step",
        lines=(Line(metric="reward/mean", label="mean", spread="reward/std", bounds=("reward/min", "reward/max")),),
    ),
    PanelSpec(
        title="Held-out accuracy",
        note="share of prompts that are never trained on; bars: 95 % interval (Wilson)",
        lines=(
            Line(metric="eval/accuracy_greedy", label="greedy"),
            Line(metric="eval/accuracy_sampled", label="sampled"),
        ),
        is_proportion=True,
    ),
    _make_single("Loss", "actor/loss", "objective of the update"),
    _make_single("Held-out loss", "eval/loss", "loss of given rows that are never trained on"),
    PanelSpec(
        title="Right tokens and pairs",
        note="given rows: share of tokens and of whole completions with a probability above 1/2, or of pairs in order",
        lines=(
            Line(metric="actor/token_accuracy", label="tokens"),
            Line(metric="eval/token_accuracy", label="held-out tokens"),
            Line(metric="eval/row_accuracy", label="held-out completions"),
            Line(metric="actor/accuracy", label="pairs"),
            Line(metric="eval/accuracy", label="held-out pairs"),
        ),
    ),
    PanelSpec(
        title="Margin",
        note="chosen minus rejected completion, as the loss compares them",
        lines=(Line(metric="actor/margin", label="trained"), Line(metric="eval/margin", label="held-out")),
    ),
    PanelSpec(
        title="Distance to the teacher",
        note="nats per token of the student's samples",
        lines=(
            Line(metric="actor/teacher_kl", label="reverse KL"),
            Line(metric="actor/teacher_forward_kl", label="forward KL"),
        ),
    ),
    _make_single("Learning rate", "actor/lr", "of the last optimizer step"),
    _make_single("Gradient norm", "actor/grad_norm", "before clipping"),
    _make_single("Clip fraction", "actor/clip_fraction", "share of tokens with a clipped ratio"),
    _make_single("Entropy", "actor/entropy", "nats per token"),
    _make_single("KL", "actor/kl", "nats per token, as the algorithm estimates it"),
    PanelSpec(
        title="Importance ratio",
        note="new over old probability of a token",
        lines=(Line(metric="actor/ratio_mean", label="mean"), Line(metric="actor/ratio_max", label="maximum")),
    ),
    _make_single("Effective sample size", "actor/ess", "share of the batch, from the importance ratios"),
    _make_single("Log-probability gap", "actor/logprob_gap", "nats per token between rollout engine and trainer"),
    PanelSpec(
        title="Response length",
        note="tokens; band: from the shortest to the longest response of the step",
        lines=(
            Line(metric="response_length/mean", label="mean", bounds=("response_length/min", "response_length/max")),
            Line(metric="response_length/p50", label="median"),
            Line(metric="response_length/p90", label="90th percentile"),
            Line(metric="response_length/p99", label="99th percentile"),
        ),
    ),
    _make_single("Responses cut off", "response_length/clip_ratio", "share of responses that reached the token limit"),
    PanelSpec(
        title="Samples not trained on",
        note="count per step, by terminal event",
        lines=tuple(Line(metric=f"samples/{event}", label=event) for event in _EVENTS),
    ),
    _make_single("Groups without variance", "groups/zero_variance", "share of groups with equal rewards: no gradient"),
    PanelSpec(
        title="Staleness",
        note="versions between the weights that generated a sample and those that train on it",
        lines=(Line(metric="sched/staleness_mean", label="mean"), Line(metric="sched/staleness_max", label="maximum")),
    ),
    PanelSpec(
        title="Throughput",
        note="prompt and response tokens per second",
        lines=(
            Line(metric="perf/throughput", label="all devices"),
            Line(metric="perf/tokens_per_device_s", label="per device"),
        ),
    ),
    _make_single("Model FLOPs utilization", "perf/mfu", "model FLOPs per second over the measured matmul peak"),
    _make_single("Time of a step", "timing_s/step", "seconds"),
    PanelSpec(
        title="Rollout queue",
        note="requests of all engines",
        lines=(
            Line(metric="sched/in_flight", label="samples in flight"),
            Line(metric="sched/queued_max", label="longest queue of the step"),
            Line(metric="rollout/num_running", label="running at the end"),
            Line(metric="rollout/num_waiting", label="waiting at the end"),
        ),
    ),
    _make_single("Oldest wait", "sched/oldest_wait_s", "seconds from a request to its engine, the longest of the step"),
    _make_single("KV cache in use", "rollout/kv_use", "share of the cache's tokens"),
)
_WORDS = {"lr": "learning rate", "grad_norm": "gradient norm"}
"""Metric without its family -> its words, if these differ from the name."""
_REPLAYED = ("loss", "lr", "grad_norm", "clip_fraction", "entropy", "kl")
_REWARD_SUMMARY = ("reward/mean", "reward/std", "reward/max", "reward/min")


def panel_specs(names: Iterable[str]) -> list[PanelSpec]:
    """Returns PANELS with further panels for the metrics whose names depend on the run. names: all metrics."""
    found: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        family, slash, _ = name.partition("/")
        if slash:  # A user's metric may have the name of a family.
            found.setdefault(family, []).append(name)
    parts = [name for name in found.get("reward", ()) if name not in _REWARD_SUMMARY]
    sources = [name for name in found.get("source", ()) if name.endswith("/reward")]
    sets = [name for name in found.get("eval", ()) if name.count("/") == 2]
    replayed = [f"replay/{name}" for name in _REPLAYED if f"replay/{name}" in found.get("replay", ())]
    extra = [
        _make_group("Reward parts", "mean over the scored samples of the step", parts),
        _make_group("Reward by source", "mean over the scored samples of the source", sources),
        *_make_robot_panels(found),
        *_make_singles("Critic", "of the value model", found.get("critic", ())),
        *_make_singles("Off-policy", "mean of the step", found.get("off_policy", ())),
        *_make_singles("Replay", "of updates on drawn samples", replayed),
        _make_group("Failed samples by cause", "share of the samples that ended in the step", found.get("failed", ())),
        _make_group("Memory", "MiB at the end of the step, by role", found.get("memory", ()), scale=2.0**-20),
    ]
    held_out = PanelSpec(
        title="Held-out accuracy by set",
        note="share of prompts that are never trained on",
        lines=tuple(Line(metric=name, label=name.removeprefix("eval/").replace("/accuracy_", ", ")) for name in sets),
        is_proportion=True,
    )
    first, second, *others = PANELS
    return [spec for spec in (first, second, held_out, extra[0], extra[1], *others, *extra[2:]) if spec.lines]


def _make_robot_panels(found: Mapping[str, Sequence[str]]) -> list[PanelSpec]:
    """Returns the panels of episodes in simulators. found: family -> its metrics."""
    world = found.get("world_model", ())
    success, returns, lengths = (
        tuple(
            Line(metric=metric, label=label + metric.removeprefix(f"{family}/{name}").replace("/", ", "))
            for family, label in (("env", "simulated"), ("imagined", "imagined"))
            for metric in found.get(family, ())
            if f"{metric}/".startswith(f"{family}/{name}/")
        )
        for name in ("success", "return", "episode_length")
    )
    return [
        PanelSpec(title="Success", note="share of training episodes", lines=success),
        PanelSpec(title="Return", note="sum of the simulator's rewards of a training episode, scaled", lines=returns),
        PanelSpec(title="Episode length", note="actions of a training episode", lines=lengths),
        *_make_singles("World model", "of the fit", [n for n in world if n == "world_model/loss"]),
        _make_group("World model: error", "by steps ahead, on new episodes", [n for n in world if "/error_" in n]),
    ]


def _make_singles(family: str, note: str, names: Iterable[str]) -> list[PanelSpec]:
    """Returns a panel for each metric."""
    return [_make_single(f"{family}: {_describe_metric(name)}", name, note) for name in names]


def _describe_metric(name: str) -> str:
    """Returns the words of a metric without its family."""
    words = name.partition("/")[2]
    return _WORDS.get(words, words.replace("_", " "))


def _make_group(title: str, note: str, names: Sequence[str], *, scale: float = 1.0) -> PanelSpec:
    labels = {name: name.partition("/")[2].removesuffix("/reward") for name in names}
    lines = tuple(Line(metric=name, label=label, scale=scale) for name, label in labels.items())
    return PanelSpec(title=title, note=note, lines=lines)


def build_panels(runs: Sequence[RunData]) -> LearningPanels:
    """Builds the panels of these runs, each run in its colour; a panel of constants alone is left out."""
    names = {name for run in runs for row in (*run.rows, *run.evaluations) for name in row}
    if all(run.curve("reward/accuracy") == run.curve("reward/mean") for run in runs):
        names.discard("reward/accuracy")  # a reward of 1 or 0 is its own accuracy
    shown: list[Panel] = []
    constants: dict[str, float] = {}
    specs = panel_specs(names)
    for spec in specs if len(runs) == 1 else _split_proportions(specs):
        panel = build_panel(f"panel-{len(shown)}", spec, runs)
        if panel is None:
            continue
        if not spec.is_proportion and len(panel.steps) > 1 and _is_constant(runs, spec):
            constants |= {line.metric: values[0] for line in spec.lines if (values := _list_values(runs, line.metric))}
        else:
            shown.append(panel)
    return LearningPanels(shown=shown, constants=constants)


def _split_proportions(specs: Iterable[PanelSpec]) -> Iterator[PanelSpec]:
    """Yields the panels, with one panel per line instead of a panel with several proportions."""
    for spec in specs:
        if not spec.is_proportion or len(spec.lines) == 1:
            yield spec
            continue
        for line in spec.lines:
            yield replace(spec, title=f"{spec.title}, {line.label}", lines=(line,))


def build_panel(id_: str, spec: PanelSpec, runs: Sequence[RunData]) -> Panel | None:
    """Builds a panel; returns None if no run has one of its metrics."""
    found = [(place, run, number, line) for place, run in enumerate(runs) for number, line in enumerate(spec.lines)]
    found = [entry for entry in found if entry[1].curve(entry[3].metric)]
    steps = sorted({step for _, run, _, line in found for step, _ in run.curve(line.metric)})
    if not steps:
        return None
    present = sorted({number for _, _, number, _ in found})
    curves = []
    for place, run, number, line in found:
        several = len(runs) > 1
        label = f"{run.name}: {line.label}" if several and len(present) > 1 else run.name if several else line.label
        at = place if several else present.index(number)
        low, high = _make_band(run, line, steps, is_proportion=spec.is_proportion)
        curves.append(
            Curve(
                label=label,
                colour=RUN_COLOURS[at % len(RUN_COLOURS)],
                dash=(present.index(number) if several else 0) + at // len(RUN_COLOURS),  # colours return
                values=[
                    value if value is None else value * line.scale for value in align(run.curve(line.metric), steps)
                ],
                low=low,
                high=high,
                is_exact=line.metric.startswith("eval/") or line.metric.endswith("/lr"),
            )
        )
    kind = "points" if spec.is_proportion else "lines"
    return Panel(id=id_, title=spec.title, note=spec.note, kind=kind, steps=steps, curves=curves)


def align(curve: Sequence[tuple[float, float]], steps: Sequence[float]) -> list[float | None]:
    """Returns the value of each step; None for a step without one."""
    values = dict(curve)
    return [values.get(step) for step in steps]


Band = tuple[Sequence[float | None] | None, Sequence[float | None] | None]


def _make_band(run: RunData, line: Line, steps: Sequence[float], *, is_proportion: bool) -> Band:
    values = align(run.curve(line.metric), steps)
    if is_proportion:
        counts = align(run.curve("eval/num_prompts"), steps)
        if line.metric.count("/") > 1 or not any(counts):
            return None, None
        pairs = [wilson_interval(value, count) for value, count in zip(values, counts, strict=True)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    low, high = (align(run.curve(name), steps) for name in line.bounds) if line.bounds else ([None] * len(steps),) * 2
    if line.spread and (spread := run.curve(line.spread)):
        around = [(v, s) for v, s in zip(values, align(spread, steps), strict=True)]
        ends = zip(around, low, high, strict=True)
        limited = [_limit_band(value, deviation, lowest, highest) for (value, deviation), lowest, highest in ends]
        return [pair[0] for pair in limited], [pair[1] for pair in limited]
    return (low, high) if any(value is not None for value in low) else (None, None)


def _limit_band(
    value: float | None, deviation: float | None, lowest: float | None, highest: float | None
) -> tuple[float | None, float | None]:
    """Returns value minus and plus deviation, at least `lowest` and at most `highest` if these are known."""
    if value is None or deviation is None:
        return None, None
    low, high = value - deviation, value + deviation
    return low if lowest is None else max(low, lowest), high if highest is None else min(high, highest)


def wilson_interval(share: float | None, count: float | None) -> tuple[float | None, float | None]:
    """Returns the 95 % interval of Wilson for a proportion; (None, None) without a value or a count."""
    if share is None or not count:
        return None, None
    z2 = CONFIDENCE_Z**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = CONFIDENCE_Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _list_values(runs: Sequence[RunData], metric: str) -> list[float]:
    return [value for run in runs for value in run.values(metric)]


def _is_constant(runs: Sequence[RunData], spec: PanelSpec) -> bool:
    """Returns whether the values of each line are equal, up to the rounding of float32."""
    found = [_list_values(runs, line.metric) for line in spec.lines]
    return all(max(values) - min(values) <= ROUNDING * max(map(abs, values)) for values in found if values)
