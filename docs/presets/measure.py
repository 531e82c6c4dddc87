"""Runs the quick start under every preset and writes what came of it into the presets' pages.

    python docs/presets/measure.py local [NAME ...]     # or ray; all presets for text, or some; then writes the pages
    python docs/presets/measure.py longtail [NAME ...]  # the recipe whose answers are long-tailed, on local
    python docs/presets/measure.py pages                # writes the pages, and docs/schedules.md, from what there is

A run's figures go to measured/CLUSTER.json, by preset, so presets can be measured a few at a time. In each page the
text between two comments of one name (`measured`, `fields`, `words`) is written by this script, and nothing else of it.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from interlace.core.types import JSON
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.goodput import BINS, Ledger, ledger_of
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.run.outcome import ScheduleOutcome
from interlace.run.state import RunState
from interlace.schedule.presets import preset_names
from interlace.schedule.schedule import Schedule
from interlace.schedule.vocabulary import Vocabulary, vocabulary

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
OVERVIEW = HERE.parent / "schedules.md"
CLUSTERS = ("local", "ray")
STEPS, PARTS = 24, 8
LONGTAIL = "longtail"
LONGTAIL_STEPS = 16
LONGTAIL_EXTRA: Mapping[str, Sequence[str]] = {
    # The devices that gathering frees compute the pass of the reference.
    "rlhfuse": ("algorithm.kl_coefficient=0.001",),
}
"""Settings without which a preset has nothing to do in that recipe."""
SHOWN_SHARE = 0.005
"""Goodput bins below this are left out of a page's table."""


def command(name: str, cluster: str) -> list[str]:
    """One run."""
    settings = f"schedule={name} steps={STEPS} eval_every={STEPS} cluster.backend={cluster} cluster.devices=cpu:2"
    return ["interlace", "train", "quickstart", *settings.split()]


def longtail_command(name: str) -> list[str]:
    """Returns the words of one run of the recipe whose answers are long-tailed."""
    settings = f"schedule={name} steps={LONGTAIL_STEPS} eval_every={LONGTAIL_STEPS}"
    return ["interlace", "train", LONGTAIL, *settings.split(), *LONGTAIL_EXTRA.get(name, ())]


def measure(cluster: str, names: Sequence[str]) -> None:
    """Runs each in turn; a run that fails ends the script and leaves the others' figures as they are."""
    path = MEASURED / f"{cluster}.json"
    for name in names:
        run = f"preset-{cluster}-{name}"
        written = longtail_command(name) if cluster == LONGTAIL else command(name, cluster)
        words = [*written, "--name", run, "--overwrite", "--quiet"]
        subprocess.run([sys.executable, "-c", "from interlace.cli.main import app; app()", *words[1:]], check=True)
        told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schedules": {}}
        told["command"] = shlex.join(longtail_command("NAME") if cluster == LONGTAIL else command("NAME", cluster))
        told["schedules"] = dict(sorted({**told["schedules"], name: figures(name, Path("runs") / run)}.items()))
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(told, indent=1) + "\n")
        print(name, told["schedules"][name]["greedy"], flush=True)


def figures(name: str, folder: Path) -> dict[str, JSON]:
    """What is kept of a run."""
    run, kept = RunData.read(RunFolder(path=folder)), 4
    outcome, rewards, last = ScheduleOutcome.of(name, run), run.values("reward/mean"), run.rows[-1]
    checkpoint = Checkpoints(folder / "checkpoints", keep=1).latest()
    before = RunState.read(checkpoint).before if checkpoint else None
    size = len(rewards) // PARTS
    return {
        "steps": outcome.num_steps,
        "greedy_before": before and before.greedy_accuracy,
        "sampled_before": before and before.sampled_accuracy,
        "greedy": last["eval/accuracy_greedy"],
        "sampled": last["eval/accuracy_sampled"],
        "rewards": [round(fmean(rewards[i * size : (i + 1) * size]), 2) for i in range(PARTS)],
        "step_s": round(outcome.step_s, kept),
        "trained_tokens_per_device_s": round(outcome.trained_tokens_per_device_s, 1),
        "staleness_mean": round(outcome.staleness_mean, kept),
        "staleness_max": outcome.staleness_max,
        "length_shift": outcome.lengths and round(outcome.lengths.mean_shift, 2),
        "goodput": {bin_name: round(ledger_of(run.rows).fraction(bin_name), kept) for bin_name in BINS},
        "mechanisms": mechanisms(run),
    }


def mechanisms(run: RunData) -> Mapping[str, JSON]:
    """Returns how often what a preset is named for happened; counts are of the whole run."""
    last = run.rows[-1]
    counts = {name: last[f"rollout/num_{name}"] for name in ("interrupted", "migrated", "suspended")}
    ends = {name: sum(run.values(f"samples/{name}")) for name in ("trained", "surplus", "stale")}
    mixed = fmean(run.values("sched/mixed_versions"))
    return {"mixed_versions": round(mixed, 4), "max_tokens": max(run.values("response_length/max")), **counts, **ends}


def write_pages() -> None:
    """Brings what this script writes of every page, and of docs/schedules.md, up to date."""
    for path in (*sorted(HERE.glob("*.md")), OVERVIEW):
        path.write_text(rendered(path))


def rendered(path: Path) -> str:
    """A page as it should be."""
    found = {cluster: read(cluster) for cluster in CLUSTERS}
    longtail, text = read(LONGTAIL), path.read_text()
    if path != OVERVIEW:
        blocks = [block(path.stem, cluster, found[cluster]) for cluster in CLUSTERS]
        return replaced(text, "measured", [longtail_block(path.stem, longtail), *blocks])
    tables = [overview(found[cluster]) for cluster in CLUSTERS if found[cluster]]
    text = replaced(text, "measured", [longtail_overview(longtail), *tables] if longtail else tables)
    words = vocabulary()
    return replaced(replaced(text, "fields", list(field_sections(words))), "words", list(word_sections(words)))


def read(cluster: str) -> Mapping[str, Any]:
    """A cluster's figures; empty where nothing was measured."""
    path = MEASURED / f"{cluster}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def replaced(text: str, name: str, paragraphs: Sequence[str]) -> str:
    """A text with other paragraphs between the two comments of that name."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"no {begin} ... {end} in: {text[:60]!r}")
    return "\n".join([head + begin, "\n\n".join(paragraphs), end + tail]) if paragraphs else text


def field_sections(words: Vocabulary) -> Iterator[str]:
    """The fields of a schedule, precisely."""
    for name, entry in words.fields.items():
        default = yaml.safe_dump(Schedule().model_dump(mode="json")[name], default_flow_style=True, width=10**6)
        values = "\n".join(f"- {one if ' ' in one else f'`{one}`'}: {means}" for one, means in entry.values.items())
        written = entry.default or default.removesuffix("\n...\n").strip().replace("null", "none")
        yield f"### `{name}`\n\n{entry.meaning}\n\n{values}\n\nDefault: `{written}`."
    yield f"### Units of staleness\n\n{words.staleness}"


def word_sections(words: Vocabulary) -> Iterator[str]:
    """Other systems' words for them."""
    rows = [
        [f"`{name}`", alias.system, alias.unit or "", f"`{alias.here}`", alias.convert]
        for name, found in words.aliases.items()
        for alias in found
    ]
    yield "\n".join(table(["word", "system", "unit", "here", "how to convert"], rows))


def block(name: str, cluster: str, told: Mapping[str, Any]) -> str:
    """One preset on one cluster."""
    run = told["schedules"].get(name) if told else None
    if run is None:
        return f"On the `{cluster}` cluster: not measured; `python docs/presets/measure.py {cluster} {name}` does it."
    size = run["steps"] // PARTS
    parts = [f"{part * size + 1}-{(part + 1) * size}" for part in range(PARTS)]
    ledger = Ledger(seconds=run["goodput"])
    shown = {f"`{one}`": ledger.fraction(one) for one in BINS if ledger.fraction(one) >= SHOWN_SHARE}
    return "\n".join([
        f"On the `{cluster}` cluster, two CPU cores:",
        "",
        f"    {told['command'].replace('NAME', name)}",
        "",
        *table(["steps", *parts], [["mean reward", *(f"{reward:.2f}" for reward in run["rewards"])]]),
        "",
        f"Held-out accuracy: greedy {run['greedy_before']:.3f} before, {run['greedy']:.3f} after; at temperature 1"
        f" {run['sampled_before']:.3f} before, {run['sampled']:.3f} after. {staleness(run)} {waste(ledger)}",
        "",
        *table(["goodput bin", *shown], [["share", *(f"{share:.1%}" for share in shown.values())]]),
    ])  # fmt: skip


ONE_RUN = "Counts are exact; ratios of speed are of one run each, on two cores that nothing else used."
LONGTAIL_HEADS = (
    "tokens/s by verl-colocated's", "mixed versions", "interrupted", "suspended", "migrated", "re-prefill", "discarded",
    "surplus", "staleness mean / max", "greedy",
)  # fmt: skip


def longtail_row(name: str, found: Mapping[str, Any]) -> list[str]:
    """Returns what one preset came to where answers are long-tailed, in the order of LONGTAIL_HEADS."""
    run, base = found["schedules"][name], found["schedules"]["verl-colocated"]
    ratio = run["trained_tokens_per_device_s"] / base["trained_tokens_per_device_s"]
    counts, goodput = run["mechanisms"], run["goodput"]
    return [
        f"{ratio:.2f}",
        f"{counts['mixed_versions']:.0%}",
        *(f"{counts[name]:.0f}" for name in ("interrupted", "suspended", "migrated")),
        f"{goodput['re_prefill']:.1%}",
        f"{goodput['discarded']:.1%}",
        f"{counts['surplus']:.0f}",
        f"{run['staleness_mean']:.2f} / {run['staleness_max']:.0f}",
        f"{run['greedy']:.3f}",
    ]


def longtail_block(name: str, found: Mapping[str, Any]) -> str:
    """Returns one preset's paragraph on the recipe whose answers are long-tailed."""
    if name not in found.get("schedules", {}):
        return f"With long-tailed answers: not measured; `python docs/presets/measure.py {LONGTAIL} {name}` does it."
    words = shlex.join(longtail_command(name))
    rows = table(LONGTAIL_HEADS, [longtail_row(name, found)])
    about = f"With long-tailed answers, {LONGTAIL_STEPS} steps, four devices on two cores. {ONE_RUN}"
    return "\n".join([about, "", f"    {words}", "", *rows])


def longtail_overview(found: Mapping[str, Any]) -> str:
    """Returns the table of all presets where answers are long-tailed."""
    rows = [[f"[`{name}`](presets/{name}.md)", *longtail_row(name, found)] for name in found["schedules"]]
    return "\n".join([f"`{found['command']}`, seed 0. {ONE_RUN}", "", *table(["preset", *LONGTAIL_HEADS], rows)])


def staleness(run: Mapping[str, Any]) -> str:
    """As a sentence."""
    return f"Staleness: mean {run['staleness_mean']:.2f}, at most {run['staleness_max']:.0f}."


def waste(ledger: Ledger) -> str:
    """The largest bin that trains nothing, as a sentence."""
    worst = ledger.largest_waste()
    return f"Largest waste: `{worst.name}`, {worst.fraction:.1%} of the steps' device time." if worst else ""


def overview(told: Mapping[str, Any]) -> str:
    """All presets on one cluster."""
    rows = []
    for name, run in told["schedules"].items():
        worst = Ledger(seconds=run["goodput"]).largest_waste()
        rows.append([
            f"[`{name}`](presets/{name}.md)",
            f"{run['greedy']:.3f}",
            f"{run['sampled']:.3f}",
            f"{run['staleness_mean']:.2f} / {run['staleness_max']:.0f}",
            f"`{worst.name}` {worst.fraction:.0%}" if worst else "",
        ])  # fmt: skip
    heads = ["preset", "greedy", "temperature 1", "staleness mean / max", "largest waste"]
    return "\n".join([f"`{told['command']}`, seed 0:", "", *table(heads, rows)])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


if __name__ == "__main__":
    what, *chosen = sys.argv[1:] or ["pages"]
    if what in (*CLUSTERS, LONGTAIL):
        measure(what, chosen or [name for name in preset_names() if "embodied" not in name])
    elif what != "pages":
        sys.exit(__doc__)
    write_pages()
