"""Runs the quick start under every preset, and generates tables of docs/schedules.md and docs/reference/words.md.

    python docs/presets/measure.py local [NAME ...]     # or ray; all presets for text, or the named ones
    python docs/presets/measure.py longtail [NAME ...]  # the recipe with long-tailed answers, on local
    python docs/presets/measure.py tables               # generates the tables from the existing figures

The figures go to measured/CLUSTER.json, by preset, so presets can be measured a few at a time. In the two pages this
script replaces the text between two comments of one name: `presets`, `measured` and `words`.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from interlace.core.types import JSON
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.goodput import BINS, ledger_of
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.run.outcome import ScheduleOutcome
from interlace.run.state import RunState
from interlace.schedule.presets import load_schedule, preset_names, preset_path
from interlace.schedule.vocabulary import Vocabulary, vocabulary

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
PAGES = (HERE.parent / "schedules.md", HERE.parent / "reference" / "words.md")
CLUSTERS = ("local", "ray")
STEPS, PARTS = 24, 8
LONGTAIL = "longtail"
SIMULATED = "simulated"
"""File of the figures at 256 devices, by `python benchmarks/published.py presets --write`."""
LONGTAIL_STEPS = 16
LONGTAIL_EXTRA: Mapping[str, Sequence[str]] = {
    # The devices that gathering frees compute the pass of the reference.
    "rlhfuse": ("algorithm.kl_coefficient=0.001",),
}
"""Settings that a preset needs for its mechanism to act in that recipe."""


def command(name: str, cluster: str) -> list[str]:
    """Returns the command of one run."""
    settings = f"schedule={name} steps={STEPS} eval_every={STEPS} cluster.backend={cluster} cluster.devices=cpu:2"
    return ["interlace", "train", "quickstart", *settings.split()]


def longtail_command(name: str) -> list[str]:
    """Returns the command of one run of the recipe with long-tailed answers."""
    settings = f"schedule={name} steps={LONGTAIL_STEPS} eval_every={LONGTAIL_STEPS}"
    return ["interlace", "train", LONGTAIL, *settings.split(), *LONGTAIL_EXTRA.get(name, ())]


def measure(cluster: str, names: Sequence[str]) -> None:
    """Runs the presets in turn. A failed run ends the script and changes no figures of other presets."""
    path = MEASURED / f"{cluster}.json"
    for name in names:
        run = f"preset-{cluster}-{name}"
        written = longtail_command(name) if cluster == LONGTAIL else command(name, cluster)
        words = [*written, "--name", run, "--overwrite", "--quiet"]
        subprocess.run([sys.executable, "-c", "from interlace.cli.main import app; app()", *words[1:]], check=True)
        stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schedules": {}}
        stored["command"] = shlex.join(longtail_command("NAME") if cluster == LONGTAIL else command("NAME", cluster))
        stored["schedules"] = dict(sorted({**stored["schedules"], name: figures(name, Path("runs") / run)}.items()))
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(stored, indent=1) + "\n")
        print(name, stored["schedules"][name]["greedy"], flush=True)


def figures(name: str, folder: Path) -> dict[str, JSON]:
    """Returns the figures of a run that are stored."""
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
    """Returns counts of each mechanism (interruptions, moves, surplus) over the whole run."""
    last = run.rows[-1]
    counts = {name: last[f"rollout/num_{name}"] for name in ("interrupted", "migrated", "suspended")}
    ends = {name: sum(run.values(f"samples/{name}")) for name in ("trained", "surplus", "stale")}
    mixed = fmean(run.values("sched/mixed_versions"))
    return {"mixed_versions": round(mixed, 4), "max_tokens": max(run.values("response_length/max")), **counts, **ends}


def write_tables() -> None:
    """Brings the generated parts of the pages up to date."""
    for page in PAGES:
        page.write_text(render_page(page.read_text(encoding="utf-8")), encoding="utf-8")


def render_page(text: str) -> str:
    """Returns a page with its generated parts up to date."""
    parts = {
        "words": list(write_words(vocabulary())),
        "presets": ["\n".join(write_presets())],
        "measured": list(write_measured(read(LONGTAIL), {name: read(name) for name in CLUSTERS})),
    }
    for name, paragraphs in parts.items():
        if f"<!-- {name} -->" in text:
            text = replace_block(text, name, paragraphs)
    return text


def read(cluster: str) -> Mapping[str, Any]:
    """Returns the stored figures of a cluster; empty if nothing was measured."""
    path = MEASURED / f"{cluster}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def replace_block(text: str, name: str, paragraphs: Sequence[str]) -> str:
    """Replaces the text between the two comments of a name. Raises ValueError if a comment is missing."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"no {begin} ... {end} in: {text[:60]!r}")
    return "\n".join([head + begin, "\n\n".join(paragraphs), end + tail])


def write_words(words: Vocabulary) -> Iterator[str]:
    """Yields two tables of other systems' words: those whose value stays the same, and those to convert.

    A row has all words that a setting replaces in the same way.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, aliases in words.aliases.items():
        for alias in aliases:
            is_same = not alias.unit and re.fullmatch(r"The same \w+( or folder)?\.", alias.convert)
            way = "" if is_same else alias.convert
            found.setdefault((alias.here, alias.unit or "", way), []).append(f"`{name}` ({alias.system})")
    rows = [[f"`{here}`" if here else "", ", ".join(names), unit, way] for (here, unit, way), names in found.items()]
    yield "The same value:"
    yield "\n".join(table(["here", "words"], [row[:2] for row in rows if not row[3]]))
    yield "Other values:"
    yield "\n".join(table(["here", "words", "unit", "how to convert"], [row for row in rows if row[3]]))


HEADS = (
    "preset", "description", "generates on", "`max_staleness`", "speed", "staleness, mean/max", "accuracy",
    "256 devices",
)  # fmt: skip


def write_presets() -> list[str]:
    """Returns the comparison of all presets: description, source, devices that generate, staleness and figures."""
    longtail, simulated = read(LONGTAIL), read(SIMULATED)
    rows = []
    for name in preset_names():
        text = preset_path(name).read_text(encoding="utf-8")
        comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
        about, _, source = comment.partition("Differences: ")[0].partition("Source: ")
        schedule = load_schedule(name)
        devices, staleness = schedule.placement.of("rollout").devices, schedule.max_staleness
        file = f"[`{name}`](../interlace/schedule/presets/{name}.yaml)"
        cells = [file, link_source(about.strip(), source.strip()), f"`{devices}`", f"{staleness:g}"]
        rows.append([*cells, *longtail_cells(name, longtail), simulated_cell(name, simulated)])
    return table(HEADS, rows)


def link_source(about: str, source: str) -> str:
    """Returns the description of a preset with a link at its arXiv number, or after it if it has none."""
    if not source:
        return about
    linked = re.sub(r"arXiv [\d.]+", rf"[\g<0>]({source})", about)
    return linked if linked != about else f"{about} [source]({source})"


def write_measured(longtail: Mapping[str, Any], clusters: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the commands of the measurements."""
    runs = [run for one in clusters.values() for run in one["schedules"].values()]
    accuracies = [run["greedy"] for run in runs]
    yield (
        f"`{longtail['command']}`, seed 0, four devices on two cores, one run each. Speed is trained tokens/s relative "
        "to `verl-colocated`; accuracy is held-out. `rlhfuse` has `algorithm.kl_coefficient=0.001` in addition."
    )
    yield (
        f"After the quick start under the same presets (`{clusters['local']['command']}`, and `cluster.backend=ray`) "
        f"the accuracy is {min(accuracies):.3f} to {max(accuracies):.3f}, from {runs[0]['greedy_before']:.3f} before."
    )


def longtail_cells(name: str, found: Mapping[str, Any]) -> list[str]:
    """Returns speed, staleness and accuracy of one preset on long-tailed answers; empty if it was not measured."""
    run, base = found["schedules"].get(name), found["schedules"]["verl-colocated"]
    if run is None:
        return [""] * 3
    ratio = run["trained_tokens_per_device_s"] / base["trained_tokens_per_device_s"]
    return [f"{ratio:.2f}", f"{run['staleness_mean']:.2f}/{run['staleness_max']:.0f}", f"{run['greedy']:.3f}"]


def simulated_cell(name: str, found: Mapping[str, Any]) -> str:
    """Returns the simulated speed of one preset; empty if it was not simulated."""
    run = found["schedules"].get(name)
    if run is None:
        return ""
    notes = [f"{run['split']} %"] if run["split"] else []
    notes += [f"length {run['length_shift']:+.1%}"] if run["length_shift"] else []
    return f"{run['ratio']:.2f}" + (f" ({', '.join(notes)})" if notes else "")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


if __name__ == "__main__":
    command_name, *chosen = sys.argv[1:] or ["tables"]
    if command_name in (*CLUSTERS, LONGTAIL):
        measure(command_name, chosen or [name for name in preset_names() if "embodied" not in name])
    elif command_name != "tables":
        sys.exit(__doc__)
    write_tables()
