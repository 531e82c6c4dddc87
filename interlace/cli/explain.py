"""Meaning of a word of a schedule: a field, one of its values, another system's word, or a preset."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.yaml_text import parse_yaml, to_yaml

if TYPE_CHECKING:
    from interlace.schedule.vocabulary import Alias, FieldMeaning, Vocabulary


def explanation(word: str) -> str:
    """Lines, to be wrapped where they are shown. Raises UserError for a word that is none of them."""
    from interlace.schedule.presets import preset_names, preset_path
    from interlace.schedule.vocabulary import vocabulary

    if word in preset_names() or word.endswith((".yaml", ".yml")):
        return "\n".join(_preset(preset_path(word)))
    words = vocabulary()
    # As it is written on other systems' command lines and in their files: --partial-rollout, rollout.max_lag.
    name = word.lstrip("-").replace("-", "_").rpartition(".")[2]
    if name in words.fields:
        return "\n".join(_field(name, words))
    if name in words.aliases:
        return "\n".join(_aliases(name, words))
    owners = [field for field, entry in words.fields.items() if name in entry.values or word in entry.values]
    owners = owners or [field for field, entry in words.fields.items() if _has_setting(entry, name)]
    owners = owners or [part for part in word.split(".") if part in words.fields]  # granularity.actor
    if owners:
        return "\n\n".join("\n".join(_field(owner, words)) for owner in owners)
    values = [value for entry in words.fields.values() for value in entry.values if value.isidentifier()]
    known = {*preset_names(), *words.fields, *words.aliases, *values}
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UserError(
        f"nothing is called {word!r}.{hint} Explained are the fields of a schedule "
        f"({', '.join(sorted(words.fields))}), their values, presets (`interlace presets`), and what other systems "
        "call these."
    )


def _field(name: str, words: "Vocabulary") -> Iterator[str]:
    from interlace.schedule.presets import load_schedule, preset_names
    from interlace.schedule.schedule import Schedule

    entry = words.fields[name]
    yield f"schedule.{name}, a field of a schedule"
    yield from _meaning(entry)
    default = Schedule().model_dump(mode="json")[name]
    yield f"default: {entry.default or ('none' if default is None else _shown(default))}"
    users: dict[str, list[str]] = {}
    for preset in preset_names():
        value = load_schedule(preset).model_dump(mode="json")[name]
        if value != Schedule().model_dump(mode="json")[name]:
            users.setdefault(_shown(value), []).append(preset)
    for value, presets in users.items():
        yield f"{value}: in {', '.join(presets)}"
    foreign = [alias for alias, found in words.aliases.items() if any(f"schedule.{name}" == one.here for one in found)]
    if foreign:
        yield f"elsewhere: {', '.join(foreign)}"
    if entry.counts_versions:
        yield words.staleness


def _has_setting(entry: "FieldMeaning", name: str) -> bool:
    """Returns whether one of the entry's values is written with this key, as `{kind: migrate, batch: 48}` is."""
    return name.isidentifier() and any(
        re.search(rf"\{{.*\b{re.escape(name)}: ", text) for text in (entry.meaning, *entry.values.values())
    )


def _meaning(entry: "FieldMeaning") -> Iterator[str]:
    yield entry.meaning
    for value, meaning in entry.values.items():
        yield f"  {value}: {meaning}"


def _aliases(name: str, words: "Vocabulary") -> Iterator[str]:
    found = words.aliases[name]
    for alias in found:
        yield f"{name}, a word of {alias.system}"
        yield from _alias(alias)
    fields = [words.fields.get(alias.here.removeprefix("schedule.")) for alias in found]
    if any(field and field.counts_versions for field in fields):
        yield words.staleness


def _alias(alias: "Alias") -> Iterator[str]:
    yield f"  there: {alias.means}"
    if alias.unit:
        yield f"  unit: {alias.unit}"
    yield f"  here: {alias.here}"
    yield f"  convert: {alias.convert}"


def _preset(path: Path) -> Iterator[str]:
    from interlace.schedule.presets import FOLDER, load_schedule
    from interlace.schedule.vocabulary import vocabulary

    spec = path.stem if path.parent == FOLDER else str(path)
    fields = load_schedule(spec).model_dump(mode="json")
    text = path.read_text(encoding="utf-8")
    yield f"{spec}, a preset"
    yield from (line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    meanings = vocabulary().fields
    for name, given in (parse_yaml(text) or {}).items():
        yield f"  {name}: {_shown(given)}"
        meaning = meanings[name].values.get(str(fields[name])) if isinstance(fields[name], str) else None
        if meaning:
            yield f"    {meaning}"
    if path.parent == FOLDER:
        yield f"What differs from the original, and what it was measured to do: docs/presets/{spec}.md"


def _shown(value: object) -> str:
    """Returns the value as YAML writes it on a line."""
    return to_yaml(value, flow=True, width=10**6).removesuffix("\n...\n").strip()
