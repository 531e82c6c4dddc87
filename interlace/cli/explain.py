"""Explanation of a word: a field of a schedule, one of its values, a preset, or another system's word."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import UserError, close_names
from interlace.core.yaml_text import parse_yaml, to_yaml

if TYPE_CHECKING:
    from interlace.schedule.vocabulary import Alias, FieldMeaning, Vocabulary


def explanation(word: str) -> str:
    """Returns the explanation as lines for the caller to wrap. Raises UserError for an unknown word."""
    from interlace.schedule.presets import preset_names, preset_path
    from interlace.schedule.vocabulary import vocabulary

    if word in preset_names() or word.endswith((".yaml", ".yml")):
        return "\n".join(_explain_preset(preset_path(word)))
    words = vocabulary()
    # Other systems write settings on command lines and in files: --partial-rollout, rollout.max_lag.
    name = word.lstrip("-").replace("-", "_").rpartition(".")[2]
    if name in words.fields:
        return "\n".join(_explain_field(name, words))
    if name in words.aliases:
        return "\n".join(_explain_aliases(name, words))
    owners = [field for field, entry in words.fields.items() if name in entry.values or word in entry.values]
    owners = owners or [field for field, entry in words.fields.items() if _has_setting(entry, name)]
    owners = owners or [part for part in word.split(".") if part in words.fields]  # granularity.actor
    if owners:
        return "\n\n".join("\n".join(_explain_field(owner, words)) for owner in owners)
    foreign = {setting: values[name] for setting, values in words.values.items() if name in values}
    if foreign:
        return "\n".join(f"{setting}={word}: {sentence}" for setting, sentence in foreign.items())
    raise _make_unknown_error(word, name, words)


def _make_unknown_error(word: str, name: str, words: "Vocabulary") -> UserError:
    from interlace.schedule.presets import preset_names

    values = [value for entry in words.fields.values() for value in entry.values if value.isidentifier()]
    close = close_names(name, sorted({*preset_names(), *words.fields, *words.aliases, *values}))
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return UserError(
        f"nothing is called {word!r}.{hint} The command explains the fields of a schedule (`interlace presets NAME` "
        "lists them), their values, presets, and other systems' words for settings."
    )


def _explain_field(name: str, words: "Vocabulary") -> Iterator[str]:
    from interlace.schedule.presets import load_schedule, preset_names
    from interlace.schedule.schedule import Schedule

    entry = words.fields[name]
    yield f"schedule.{name}, a field of a schedule"
    yield from _explain_meaning(entry)
    default = Schedule().model_dump(mode="json")[name]
    yield f"default: {entry.default or ('none' if default is None else _format_value(default))}"
    users: dict[str, list[str]] = {}
    for preset in preset_names():
        value = load_schedule(preset).model_dump(mode="json")[name]
        if value != Schedule().model_dump(mode="json")[name]:
            users.setdefault(_format_value(value), []).append(preset)
    for value, presets in users.items():
        yield f"{value}: in {', '.join(presets)}"
    foreign = [alias for alias, found in words.aliases.items() if any(f"schedule.{name}" == one.here for one in found)]
    if foreign:
        yield f"elsewhere: {', '.join(foreign)}"
    if entry.counts_versions:
        yield words.staleness


def _has_setting(entry: "FieldMeaning", name: str) -> bool:
    """Returns whether a value of the field has this key, as `{kind: migrate, batch: 48}` has `batch`."""
    return name.isidentifier() and any(
        re.search(rf"\{{.*\b{re.escape(name)}: ", text) for text in (entry.meaning, *entry.values.values())
    )


def _explain_meaning(entry: "FieldMeaning") -> Iterator[str]:
    yield entry.meaning
    for value, meaning in entry.values.items():
        yield f"  {value}: {meaning}"


def _explain_aliases(name: str, words: "Vocabulary") -> Iterator[str]:
    found = words.aliases[name]
    for alias in found:
        yield f"{name}, a word of {alias.system}"
        yield from _explain_alias(alias)
    fields = [words.fields.get(alias.here.removeprefix("schedule.")) for alias in found]
    if any(field and field.counts_versions for field in fields):
        yield words.staleness


def _explain_alias(alias: "Alias") -> Iterator[str]:
    if alias.means:
        yield f"  there: {alias.means}"
    if alias.unit:
        yield f"  unit: {alias.unit}"
    if alias.here:
        yield f"  here: {alias.here}"
    yield f"  convert: {alias.convert}"


def _explain_preset(path: Path) -> Iterator[str]:
    from interlace.schedule.presets import FOLDER, load_schedule
    from interlace.schedule.vocabulary import vocabulary

    spec = path.stem if path.parent == FOLDER else str(path)
    fields = load_schedule(spec).model_dump(mode="json")
    text = path.read_text(encoding="utf-8")
    yield f"{spec}, a preset"
    yield from (line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    meanings = vocabulary().fields
    for name, given in (parse_yaml(text) or {}).items():
        yield f"  {name}: {_format_value(given)}"
        meaning = meanings[name].values.get(str(fields[name])) if isinstance(fields[name], str) else None
        if meaning:
            yield f"    {meaning}"
    if path.parent == FOLDER:
        yield "Measured results: docs/schedules.md"


def _format_value(value: object) -> str:
    """Returns the value as one line of YAML."""
    return to_yaml(value, flow=True, width=10**6).removesuffix("\n...\n").strip()
